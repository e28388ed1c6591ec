// Few query rows per kv head (decode): memory bound, so every key and value is read once, in the order in which it lies,
// for all the query heads that share it. Keys are in lanes while scoring, value elements while summing.
//
//   chunk of <= 128 keys:   scores [rows, 128]  ->  softmax, unnormalised  ->  sum [rows, dv]
//
// Rows of a job: ((kv head - first kv head) * queries + query) * group + head within the group.
// Included by kernels.cpp inside a level's namespace.

// How scores are made: of widened floats (any cache type), or of bf16 pairs where the machine multiplies those itself.
template <class T>
struct WidenedDots {
  using Query = float;
  using Key = T;
  static constexpr int step = W;
  using Loaded = F;
  static inline Loaded load_query(const float* p) { return load(p); }
  static inline Loaded load_key(const T* p) { return load(p); }
  static inline F dot(F sum, Loaded q, Loaded k) { return fma(q, k, sum); }
};
#if defined(__AVX512BF16__)
struct PairDots {
  using Query = bf16;
  using Key = bf16;
  static constexpr int step = 32;
  using Loaded = __m512bh;
  static inline Loaded load_query(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static inline Loaded load_key(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static inline F dot(F sum, Loaded q, Loaded k) { return _mm512_dpbf16_ps(sum, q, k); }
};
#endif

struct Partial {
  float* m;  // [rows]
  float* l;  // [rows]
  float* sum;  // [rows, padded dv]
};
static inline Partial partial_at(float* at, int64_t rows) { return {at, at + padded(rows), at + 2 * padded(rows)}; }

// What to ask of memory meanwhile: one head's part of the rows of a block that is wanted soon. Pages are scattered, so the machine's
// own prefetcher loses the thread at the end of each. Into the second-level cache: it has more requests under way than the first.
template <class T>
struct Ahead {
  const T* const* rows;  // as many as are computed on meanwhile, or null
  int64_t offset;
  int width;

  // Always inline: GCC takes a function that only prefetches for one without effect, and drops the calls.
  __attribute__((always_inline)) inline void fetch(int row) const {
    const char* at = (const char*)(rows[row] + offset);
    for (int i = 0; i < width * int(sizeof(T)); i += 64) __builtin_prefetch(at + i, 0, 2);
  }
};

constexpr int kTogether = 16;  // values are summed by as many at a time: a block
constexpr int kBytesAhead = 49152;

// Keys or values in the order in which they will be read: blocks of this chunk, of the next, and of the first of the task to come.
// For each block that is read, the one so many blocks later is asked for, so that memory is asked for evenly.
template <class T>
struct Coming {
  struct Part {
    const T* const* rows;
    int blocks;
    int64_t offset;
    int width;
  };
  Part parts[6];
  int count, ahead;

  void add(const T* const* rows, int n, int64_t offset, int width) {
    parts[count++] = {rows, (n + kTogether - 1) / kTogether, offset, width};
  }
  // What to ask for while the rows from `at` on of a part are read for one head. Parts before this one: `skip` blocks.
  Ahead<T> while_reading(int skip, int at, int head) const {
    int block = skip + at / kTogether + ahead;
    for (int p = 0; p < count; block -= parts[p++].blocks)
      if (block < parts[p].blocks)
        return {parts[p].rows + block * kTogether + at % kTogether, parts[p].offset + int64_t(head) * parts[p].width, parts[p].width};
    return {nullptr, 0, 0};
  }
  // All that nobody has asked for, at the beginning.
  void begin(int heads) const {
    for (int b = 0; b < ahead; b++)
      for (int h = 0; h < heads; h++) {
        const Ahead<T> first = while_reading(b - ahead, 0, h);
        for (int i = 0; first.rows && i < kTogether; i++) first.fetch(i);
      }
  }
};

// Scores of W keys for R rows.
template <class D, int R, class T>
static inline void score_rows(const typename D::Query* query, int64_t query_row, const typename D::Key* const* keys,
                              int64_t offset, int width, float* scores, Ahead<T> ahead) {
  F fours[R][W / 4];
#pragma GCC unroll 4
  for (int g = 0; g < W / 4; g++) {
    F acc[R][4];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = zero();
    if (ahead.rows)
      for (int k = 0; k < 4; k++) ahead.fetch(4 * g + k);
    const typename D::Key *k0 = keys[4 * g] + offset, *k1 = keys[4 * g + 1] + offset;
    const typename D::Key *k2 = keys[4 * g + 2] + offset, *k3 = keys[4 * g + 3] + offset;
    for (int d = 0; d < width; d += D::step) {
      const typename D::Loaded a = D::load_key(k0 + d), b = D::load_key(k1 + d);
      const typename D::Loaded c = D::load_key(k2 + d), e = D::load_key(k3 + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const typename D::Loaded q = D::load_query(query + r * query_row + d);
        acc[r][0] = D::dot(acc[r][0], q, a);
        acc[r][1] = D::dot(acc[r][1], q, b);
        acc[r][2] = D::dot(acc[r][2], q, c);
        acc[r][3] = D::dot(acc[r][3], q, e);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) fours[r][g] = four_sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) store(scores + r * kStreamChunk, join_sums(fours[r]));
}

template <class D, class T>
static inline void score(int rows, const typename D::Query* query, int64_t query_row, const typename D::Key* const* keys,
                         int64_t offset, int width, float* scores, Ahead<T> ahead) {
  constexpr int most_rows = W == 16 ? 3 : 2;  // what the registers hold
  for (int r = 0; r < rows;) {
    const typename D::Query* q = query + r * query_row;
    float* s = scores + r * kStreamChunk;
    if (most_rows == 3 && rows - r != 4 && rows - r >= 3) {
      score_rows<D, 3>(q, query_row, keys, offset, width, s, ahead);
      r += 3;
    } else if (rows - r >= 2) {
      score_rows<D, 2>(q, query_row, keys, offset, width, s, ahead);
      r += 2;
    } else {
      score_rows<D, 1>(q, query_row, keys, offset, width, s, ahead);
      r += 1;
    }
    ahead.rows = nullptr;  // asked for once
  }
}

// sum[r] += sum over n keys of weight[r][key] * value[key], for R rows and C vectors of value elements.
template <class T, int R, int C, class T2>
static inline void gather_values(const float* weights, const T* const* values, int64_t offset, int n, float* sum, int64_t sum_row,
                                 Ahead<T2> ahead) {
  F acc[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = load(sum + r * sum_row + c * W);
  for (int i = 0; i < n; i++) {
    if (ahead.rows) ahead.fetch(i);
    const T* value = values[i] + offset;
    F v[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) v[c] = load(value + c * W);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const F p = set1(weights[r * kStreamChunk + i]);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = fma(p, v[c], acc[r][c]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(sum + r * sum_row + c * W, acc[r][c]);
}

template <class T, int R, class T2>
static inline void sum_values(const float* weights, const T* const* values, int64_t offset, int n, int width, float* sum,
                              int64_t sum_row, Ahead<T2> ahead) {
  constexpr int wide = W == 16 ? 4 : 2;
  int d = 0;
  for (; d + wide * W <= width; d += wide * W, ahead.rows = nullptr)
    gather_values<T, R, wide>(weights, values, offset + d, n, sum + d, sum_row, ahead);
  for (; d < width; d += W, ahead.rows = nullptr)
    gather_values<T, R, 1>(weights, values, offset + d, n, sum + d, sum_row, ahead);
}

template <class T, class T2>
static inline void sum_values(int rows, const float* weights, const T* const* values, int64_t offset, int n, int width,
                              float* sum, int64_t sum_row, Ahead<T2> ahead) {
  for (int r = 0; r < rows; r += 4, ahead.rows = nullptr) {
    const float* w = weights + r * kStreamChunk;
    float* s = sum + r * sum_row;
    if (rows - r >= 4) sum_values<T, 4>(w, values, offset, n, width, s, sum_row, ahead);
    if (rows - r == 3) sum_values<T, 3>(w, values, offset, n, width, s, sum_row, ahead);
    if (rows - r == 2) sum_values<T, 2>(w, values, offset, n, width, s, sum_row, ahead);
    if (rows - r == 1) sum_values<T, 1>(w, values, offset, n, width, s, sum_row, ahead);
  }
}

// Raw scores of one row become weights 2^(x - m); keys outside [first, end) get 0.
static inline void soften(const Attention& a, float* scores, int n, int first, int end, float* m, float* l) {
  const Shape shape = shape_of(a);
  const int whole = up_to_multiple(n, W);
  F best = set1(kHidden);
  for (int i = 0; i < whole; i += W) {
    const F x = shape_scores(load(scores + i), shape);
    store(scores + i, x);
    best = max(best, x);
  }
  if (first > 0 || end < n) {
    for (int i = 0; i < first; i++) scores[i] = kHidden;
    for (int i = end; i < n; i++) scores[i] = kHidden;
    best = set1(kHidden);
    for (int i = 0; i < n; i++) best = max(best, set1(scores[i]));
  }
  for (int i = n; i < whole; i++) scores[i] = kHidden;
  const float highest = top(best);
  F total = zero();
  for (int i = 0; i < whole; i += W) {
    const F p = power2(sub(load(scores + i), set1(highest)));
    store(scores + i, p);
    total = add(total, p);
  }
  *m = highest;
  *l = sum(total);
}

// into = into and next together. `next` is left as it is.
static void fold_stream(const Attention& a, int64_t rows, Partial into, Partial next) {
  const int64_t width = padded(a.dv);
  for (int64_t r = 0; r < rows; r++) {
    const float m = into.m[r] > next.m[r] ? into.m[r] : next.m[r];
    float lanes[W];
    store(lanes, power2(sub(set1(into.m[r]), set1(m))));
    const float keep = lanes[0];
    store(lanes, power2(sub(set1(next.m[r]), set1(m))));
    const float take = lanes[0];
    into.m[r] = m;
    into.l[r] = into.l[r] * keep + next.l[r] * take;
    float* sum = into.sum + r * width;
    const float* other = next.sum + r * width;
    for (int64_t d = 0; d < width; d += W) store(sum + d, fma(load(other + d), set1(take), mul(load(sum + d), set1(keep))));
  }
}

static void write_stream(const Attention& a, const Job& j, Partial p) {
  int64_t r = 0;
  for (int h = 0; h < j.heads; h++)
    for (int q = 0; q < j.queries; q++)
      for (int g = 0; g < a.group; g++, r++) {
        const int head = (j.head + h) * a.group + g;
        float factor = 1.0f, l = p.l[r];
        if (a.sinks) {
          const float sink = a.sinks[head] * kLog2E, m = p.m[r] > sink ? p.m[r] : sink;
          float lanes[W];
          store(lanes, power2(sub(set1(p.m[r]), set1(m))));
          factor = lanes[0];
          store(lanes, power2(sub(set1(sink), set1(m))));
          l = l * factor + lanes[0];
        }
        write_out(a, j.row + q, head, p.sum + r * padded(a.dv), set1(factor / l));
      }
}

template <class T>
struct Chunk {
  int begin, n;
  Rows<T> rows;
  Coming<T> coming;
};

template <class T, class D>
static void score_chunk(const Attention& a, const Job& j, const Chunk<T>& chunk, const typename D::Query* query, int64_t query_row,
                        float* scores, Scratch scratch) {
  const int per_head = j.queries * a.group;
  constexpr bool widened = sizeof(typename D::Query) == 4;
  const bool direct = a.dk % D::step == 0 && (!widened || sizeof(T) == 4 || per_head == 1);
  typename D::Query* copy = scratch.take<typename D::Query>(W * query_row);
  const typename D::Query* copies[W];
  for (int i = 0; i < W; i++) copies[i] = copy + i * query_row;
  if (!direct && !widened) __builtin_memset((void*)copy, 0, W * query_row * sizeof(typename D::Query));
  for (int i = 0; i < chunk.n; i += W)
    for (int h = 0; h < j.heads; h++) {
      const typename D::Query* q = query + h * per_head * query_row;
      float* s = scores + h * per_head * kStreamChunk + i;
      const int64_t offset = int64_t(j.head + h) * a.dk;
      const Ahead<T> ahead = chunk.coming.while_reading(0, i, h);
      if (direct) {
        score<D>(per_head, q, query_row, chunk.rows.keys + i, offset, a.dk, s, ahead);
        continue;
      }
      for (int k = 0; k < W; k++) {
        if constexpr (widened) widen_row(chunk.rows.keys[i + k] + offset, a.dk, int(query_row), copy + k * query_row);
        else __builtin_memcpy(copy + k * query_row, chunk.rows.keys[i + k] + offset, a.dk * sizeof(T));
      }
      if constexpr (widened) score<WidenedDots<float>>(per_head, q, query_row, copies, 0, int(query_row), s, ahead);
      else score<D>(per_head, q, query_row, copies, 0, int(query_row), s, ahead);
    }
}

template <class T>
static void sum_chunk(const Attention& a, const Job& j, const Chunk<T>& chunk, const float* scores, float* sum, Scratch scratch) {
  const int per_head = j.queries * a.group;
  const int64_t width = padded(a.dv);
  for (int64_t d = 0; d < per_head * j.heads * width; d += W) store(sum + d, zero());
  float* wide = scratch.take<float>(kTogether * width);
  const float* wides[kTogether];
  for (int i = 0; i < kTogether; i++) wides[i] = wide + i * width;
  for (int i = 0; i < chunk.n; i += kTogether)
    for (int h = 0; h < j.heads; h++) {
      const int count = least(kTogether, chunk.n - i);
      const float* weights = scores + h * per_head * kStreamChunk + i;
      const int64_t offset = int64_t(j.head + h) * a.dv;
      const Ahead<T> ahead = chunk.coming.while_reading(chunk.coming.parts[0].blocks, i, h);
      float* to = sum + h * per_head * width;
      if (a.dv % W == 0) {
        sum_values(per_head, weights, chunk.rows.values + i, offset, count, a.dv, to, width, ahead);
        continue;
      }
      for (int k = 0; k < count; k++) widen_row(chunk.rows.values[i + k] + offset, a.dv, int(width), wide + k * width);
      sum_values(per_head, weights, wides, 0, count, int(width), to, width, ahead);
    }
}

template <class T, class D>
static void stream_chunk(const Attention& a, const Job& j, const Chunk<T>& chunk, const typename D::Query* query, int64_t query_row,
                         Partial p, Scratch scratch) {
  float* scores = scratch.take<float>(int64_t(j.queries) * a.group * j.heads * kStreamChunk);
  score_chunk<T, D>(a, j, chunk, query, query_row, scores, scratch);
  for (int h = 0, r = 0; h < j.heads; h++)
    for (int q = 0; q < j.queries; q++) {
      const int position = j.position + q, first = a.window ? position - a.window + 1 : 0;
      for (int g = 0; g < a.group; g++, r++)
        soften(a, scores + r * kStreamChunk, chunk.n, most(first - chunk.begin, 0), least(position + 1 - chunk.begin, chunk.n),
               p.m + r, p.l + r);
    }
  sum_chunk(a, j, chunk, scores, p.sum, scratch);
}

struct Span {
  int begin, end;  // positions
};
static inline Span chunk_of(const Job& j, int c) {
  const int64_t at = int64_t(j.first_key / j.chunk_size + c) * j.chunk_size;
  return {most(int(at), j.first_key), int(at + j.chunk_size < j.end_key ? at + j.chunk_size : j.end_key)};
}

static inline int stream_query_row(const Attention& a) { return up_to_multiple(a.dk, 32); }

static size_t stream_scratch(const Attention& a) {
  const size_t rows = size_t(kStreamRows) * a.kv_heads, width = padded(a.dv), query_row = stream_query_row(a);
  return rows * query_row * 4 + 2 * rows * (width + 2) * 4 + 128 * 4 + 6 * kStreamChunk * 8 + rows * kStreamChunk * 4 +
         W * query_row * 4 + 32 * width * 4 + 18 * 64;
}

template <class T, class D>
static void run_stream(const Attention& a, const Job& j, int first_chunk, int end_chunk, float* partials, char* memory, After after) {
  Scratch scratch = {memory};
  const int64_t rows = int64_t(j.queries) * a.group * j.heads, query_row = stream_query_row(a);
  typename D::Query* query = scratch.take<typename D::Query>(rows * query_row);
  int64_t r = 0;
  for (int h = 0; h < j.heads; h++)
    for (int q = 0; q < j.queries; q++)
      for (int g = 0; g < a.group; g++, r++) {
        const int head = (j.head + h) * a.group + g;
        if constexpr (sizeof(typename D::Query) == 4) {
          widen_query(a, j.row + q, head, int(query_row), query + r * query_row);
        } else {
          const bf16* from = (const bf16*)a.query + (j.row + q) * a.query_row + head * a.query_head;
          for (int d = 0; d < query_row; d++) query[r * query_row + d] = d < a.dk ? from[d] : bf16{0};
        }
      }
  const int64_t floats = partial_floats(a, j);
  const Partial whole = partial_at(partials ? partials : scratch.take<float>(floats), rows);
  const Partial next = partial_at(partials ? partials : scratch.take<float>(floats), rows);
  Rows<T> found[3];  // of this chunk, the next, and the first of the task to come
  for (Rows<T>& rows : found) rows = {scratch.take<const T*>(kStreamChunk), scratch.take<const T*>(kStreamChunk)};
  const auto find = [&](const Job& job, int c, Rows<T> rows) {
    const Span span = chunk_of(job, c);
    find_rows(a, job, span.begin, span.end, kTogether, rows);
  };
  if (after.job) find(*after.job, after.chunk, found[2]);
  find(j, first_chunk, found[0]);
  for (int c = first_chunk; c < end_chunk; c++) {
    const Span span = chunk_of(j, c);
    Chunk<T> chunk = {span.begin, span.end - span.begin, found[0], {}};
    chunk.coming.ahead = most(1, kBytesAhead / (kTogether * j.heads * most(a.dk, a.dv) * int(sizeof(T))));
    const auto comes = [&](const Job& job, int of, Rows<T> rows) {
      const Span there = chunk_of(job, of);
      chunk.coming.add(rows.keys, there.end - there.begin, int64_t(job.head) * a.dk, a.dk);
      chunk.coming.add(rows.values, there.end - there.begin, int64_t(job.head) * a.dv, a.dv);
    };
    comes(j, c, found[0]);
    if (c + 1 < end_chunk) {
      find(j, c + 1, found[1]);
      comes(j, c + 1, found[1]);
    }
    if (c + 2 >= end_chunk && after.job) comes(*after.job, after.chunk, found[2]);
    if (c == first_chunk && !after.asked) chunk.coming.begin(j.heads);
    const Partial here = partials ? partial_at(partials + c * floats, rows) : c == 0 ? whole : next;
    stream_chunk<T, D>(a, j, chunk, query, query_row, here, scratch);
    if (!partials && c > 0) fold_stream(a, rows, whole, next);
    const Rows<T> done = found[0];
    found[0] = found[1];
    found[1] = done;
  }
  if (!partials) write_stream(a, j, whole);
}
