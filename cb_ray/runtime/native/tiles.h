// Many query rows per kv head (prefill, or decode with a wide group): compute bound, so small matrix products with query
// rows in lanes. Keys and values are then read one number (or bf16 pair) at a time, broadcast, straight from the cache:
// nothing of the cache has to be transposed.
//
//   scores[key, row]  =  key[key, d]  x  query[d, row]          block of <= 64 keys
//   weights[key, row] =  2^(scores - m[row])                    in place, column by column
//   sum[dv, row]      =  sum[dv, row] * 2^(old m - m)[row]  +  value[key, dv] (transposed by the way it is read)  x  weights
//
// Rows of a job: query * group + head within the group, padded to 16 lanes. A tiled job has one kv head.
// Included by kernels.cpp inside a level's namespace.

// The two ways to multiply: floats (any cache type, widened first), or pairs of bf16.
struct Floats {
  using Element = float;
  static inline F splat(const float* p) { return set1(*p); }
  static inline F step(F sum, F a, F b) { return fma(a, b, sum); }
};
#if defined(__AVX512BF16__)
struct Pairs {
  using Element = uint32_t;
  static inline F splat(const uint32_t* p) {
    uint32_t bits;
    __builtin_memcpy(&bits, p, 4);
    return _mm512_castsi512_ps(_mm512_set1_epi32(int(bits)));
  }
  static inline F step(F sum, F a, F b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
};
#endif

// scores[i, lanes] = sum over d of keys[i][d] * query[d, lanes], for R keys and C vectors of lanes.
template <class M, int R, int C>
static inline void multiply_keys(const typename M::Element* const* keys, const float* query, int depth, int lanes, float* scores) {
  F acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  const typename M::Element* k[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) k[r] = keys[r];
  for (int d = 0; d < depth; d++, query += lanes) {
    F q[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) q[c] = load(query + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const F x = M::splat(k[r] + d);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = M::step(acc[r][c], x, q[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(scores + r * lanes + c * W, acc[r][c]);
}

// sum[i, lanes] = sum[i, lanes] * keep[lanes] + sum over n of values[n][i] * weights[n, lanes], for R value elements.
template <class M, int R, int C>
static inline void multiply_values(const typename M::Element* const* values, int64_t offset, const float* weights, int depth,
                                   int lanes, const float* keep, float* sum) {
  F acc[R][C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) {
    const F factor = load(keep + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r][c] = mul(load(sum + r * lanes + c * W), factor);
  }
  for (int n = 0; n < depth; n++, weights += lanes) {
    const typename M::Element* v = values[n] + offset;
    F p[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) p[c] = load(weights + c * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const F x = M::splat(v + r);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = M::step(acc[r][c], x, p[c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(sum + r * lanes + c * W, acc[r][c]);
}

constexpr int kWide = W == 16 ? 4 : 2;  // vectors of lanes at a time, and rows with them: 16 or 8 sums in registers
constexpr int kNarrowRows = W == 16 ? 8 : 4;

template <class M>
static inline void all_scores(const typename M::Element* const* keys, const float* query, int n, int depth, int lanes, float* scores) {
  int c = 0;
  for (; c + kWide * W <= lanes; c += kWide * W)
    for (int i = 0; i < n; i += 4) multiply_keys<M, 4, kWide>(keys + i, query + c, depth, lanes, scores + i * lanes + c);
  if (W == 16 && c + 2 * W <= lanes) {
    for (int i = 0; i < n; i += kNarrowRows) multiply_keys<M, kNarrowRows, 2>(keys + i, query + c, depth, lanes, scores + i * lanes + c);
    c += 2 * W;
  }
  for (; c < lanes; c += W)
    for (int i = 0; i < n; i += kNarrowRows) multiply_keys<M, kNarrowRows, 1>(keys + i, query + c, depth, lanes, scores + i * lanes + c);
}

template <class M>
static inline void all_sums(const typename M::Element* const* values, const float* weights, int n, int width, int lanes,
                            const float* keep, float* sum) {
  int c = 0;
  for (; c + kWide * W <= lanes; c += kWide * W)
    for (int d = 0; d < width; d += 4)
      multiply_values<M, 4, kWide>(values, d, weights + c, n, lanes, keep + c, sum + d * lanes + c);
  if (W == 16 && c + 2 * W <= lanes) {
    for (int d = 0; d < width; d += kNarrowRows)
      multiply_values<M, kNarrowRows, 2>(values, d, weights + c, n, lanes, keep + c, sum + d * lanes + c);
    c += 2 * W;
  }
  for (; c < lanes; c += W)
    for (int d = 0; d < width; d += kNarrowRows)
      multiply_values<M, kNarrowRows, 1>(values, d, weights + c, n, lanes, keep + c, sum + d * lanes + c);
}

// One vector of query rows: where they stand, and what they have seen so far.
struct Lanes {
  const float* last;  // position of each row: the last key it sees
  const float* first;  // the first key it sees
  float* m;
  float* l;
  float* keep;
};

// Raw scores as they are to be compared, in place; `hide`: some row may not see some key.
static inline void shape_lanes(const Attention& a, float* scores, int n, int lanes, int begin, bool hide, Lanes rows) {
  const Shape shape = shape_of(a);
  for (int c = 0; c < lanes; c += W) {
    const F first = load(rows.first + c), last = load(rows.last + c);
    for (int i = 0; i < n; i++) {
      F x = shape_scores(load(scores + i * lanes + c), shape);
      if (hide) {
        const F position = set1(float(begin + i));
        x = pick_less(last, position, set1(kHidden), pick_less(position, first, set1(kHidden), x));
      }
      store(scores + i * lanes + c, x);
    }
  }
}

// How weights lie for the product with the values: as floats, or two keys side by side as bf16.
template <class M>
static inline void store_weights(float* at, int lanes, F one, F other, bool both) {
  store(at, one);
  if (both) store(at + lanes, other);
}
#if defined(__AVX512BF16__)
static inline __m512i interleaved(F even, F odd) {  // lane by lane, the even one in the low half
  const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                          19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(places, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}
template <>
inline void store_weights<Pairs>(float* at, int, F one, F other, bool both) {
  store(at, _mm512_castsi512_ps(interleaved(one, both ? other : zero())));
}
#endif

// Scores of n keys into weights, in place; `factor` brings them to powers of two where shape_lanes has not.
template <class M>
static inline void soften_lanes(float* scores, int n, int lanes, F factor, Lanes rows) {
  constexpr bool pairs = !same<M, Floats>;
  for (int c = 0; c < lanes; c += W) {
    F high[4];
    high[0] = high[1] = high[2] = high[3] = load(scores + c);
    int i = 1;
    for (; i + 4 <= n; i += 4)
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) high[k] = max(high[k], load(scores + (i + k) * lanes + c));
    for (; i < n; i++) high[0] = max(high[0], load(scores + i * lanes + c));
    const F before = load(rows.m + c);
    const F best = max(before, mul(max(max(high[0], high[1]), max(high[2], high[3])), factor));
    const F below = sub(zero(), best);
    F total = zero(), other_total = zero();
    for (i = 0; i < n; i += 2) {
      const bool both = i + 1 < n;
      const F p = power2(fma(load(scores + i * lanes + c), factor, below));
      const F q = both ? power2(fma(load(scores + (i + 1) * lanes + c), factor, below)) : zero();
      total = add(total, p);
      other_total = add(other_total, q);
      store_weights<M>(scores + (pairs ? i / 2 : i) * lanes + c, lanes, p, q, both);
    }
    const F keep = power2(sub(before, best));
    store(rows.keep + c, keep);
    store(rows.l + c, fma(load(rows.l + c), keep, add(total, other_total)));
    store(rows.m + c, best);
  }
}

#if defined(__AVX512BF16__)
// Rows n and n + 1 of the values, side by side: [n / 2, width] pairs.
static inline void pair_values(const bf16* const* values, int64_t offset, int n, int dv, int width, uint32_t* pairs) {
  for (int i = 0; i < n; i += 2) {
    const uint16_t* even = &values[i][offset].bits;
    const uint16_t* odd = i + 1 < n ? &values[i + 1][offset].bits : nullptr;
    uint32_t* to = pairs + int64_t(i / 2) * width;
    for (int d = 0; d < width; d += 16) {
      const __mmask16 there = d + 16 <= dv ? 0xffff : (1u << (dv > d ? dv - d : 0)) - 1;
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, even + d));
      const __m512i high = odd ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, odd + d)) : _mm512_setzero_si512();
      _mm512_storeu_si512(to + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}
#endif

struct Tile {
  float* query;  // [depth, lanes]: floats, or bf16 pairs
  int depth;  // dk, or half of it
  int lanes;
  float* last;
  float* first;
  float* m;
  float* l;
  float* sum;
};
static inline int tile_lanes(const Attention& a, const Job& j) { return int(padded(int64_t(j.queries) * a.group)); }

// Query rows into lanes, by squares of W x W numbers of 32 bits.
template <bool pairs>
static void load_tile(const Attention& a, const Job& j, Tile t, float* row_memory) {
  const int rows = j.queries * a.group, width = up_to_multiple(t.depth, W);
  for (int r = 0; r < t.lanes; r += W) {
    for (int i = 0; i < W; i++) {
      float* to = row_memory + i * width;
      const int row = r + i, head = j.head * a.group + row % a.group;
      if (row >= rows) __builtin_memset((void*)to, 0, width * 4);
      else if (!pairs) widen_query(a, j.row + row / a.group, head, width, to);
      else {
        __builtin_memset((void*)to, 0, width * 4);
        __builtin_memcpy((void*)to, (const bf16*)a.query + (j.row + row / a.group) * a.query_row + head * a.query_head, a.dk * 2);
      }
    }
    for (int d = 0; d < t.depth; d += W) {
      F square[W];
      for (int i = 0; i < W; i++) square[i] = load(row_memory + i * width + d);
      transpose(square);
      for (int i = 0; i < W && d + i < t.depth; i++) store(t.query + (d + i) * t.lanes + r, square[i]);
    }
  }
  for (int r = 0; r < t.lanes; r++) {
    const int position = j.position + least(r, rows - 1) / a.group;
    t.last[r] = float(position);
    t.first[r] = a.window ? float(position - a.window + 1) : 0.0f;
  }
}

template <class T, class M>
static void tile_chunk(const Attention& a, const Job& j, int begin, int end, Tile t, Scratch scratch) {
  constexpr bool pairs = sizeof(T) == 2 && same<typename M::Element, uint32_t>;
  constexpr bool direct = pairs || sizeof(T) == 4;
  const int width = int(padded(a.dv)), key_width = up_to_multiple(a.dk, W), last_query = j.position + j.queries - 1;
  using E = typename M::Element;
  Rows<T> rows = {scratch.take<const T*>(kTileBlock), scratch.take<const T*>(kTileBlock)};
  float* scores = scratch.take<float>(int64_t(kTileBlock) * t.lanes);
  float* keep = scratch.take<float>(t.lanes);
  E* key_copy = scratch.take<E>(int64_t(kTileBlock) * key_width);
  E* value_copy = scratch.take<E>(int64_t(kTileBlock) * width);
  const E** keys = scratch.take<const E*>(kTileBlock);
  const E** values = scratch.take<const E*>(kTileBlock);
  const int64_t key_offset = int64_t(j.head) * a.dk, value_offset = int64_t(j.head) * a.dv;
  const bool copy_keys = !direct || (pairs && a.dk % 2), copy_values = sizeof(T) == 2 || a.dv % 16;

  for (int c = 0; c < t.lanes; c++) t.m[c] = kHidden, t.l[c] = 0.0f;
  __builtin_memset((void*)t.sum, 0, int64_t(width) * t.lanes * 4);
  for (int at = begin; at < end; at += kTileBlock) {
    const int n = least(kTileBlock, end - at), whole = up_to_multiple(n, 8);
    find_rows(a, j, at, at + n, 8, rows);
    for (int i = 0; i < whole; i++) {
      keys[i] = copy_keys ? key_copy + i * key_width : (const E*)(rows.keys[i] + key_offset);
      if (!copy_keys) continue;
      if constexpr (pairs) {
        key_copy[i * key_width + t.depth - 1] = 0;
        __builtin_memcpy(key_copy + i * key_width, rows.keys[i] + key_offset, a.dk * sizeof(T));
      } else widen_row(rows.keys[i] + key_offset, a.dk, key_width, (float*)key_copy + i * key_width);
    }
    all_scores<M>(keys, t.query, whole, t.depth, t.lanes, scores);
    const bool hide = at + n - 1 > j.position || (a.window && at <= last_query - a.window);
    const Lanes lanes = {t.last, t.first, t.m, t.l, keep};
    const bool shaped = hide || a.softcap > 0 || a.scale <= 0;
    if (shaped) shape_lanes(a, scores, n, t.lanes, at, hide, lanes);
    soften_lanes<M>(scores, n, t.lanes, set1(shaped ? 1.0f : a.scale * kLog2E), lanes);
    const int value_rows = pairs ? (n + 1) / 2 : n;
    for (int i = 0; i < value_rows; i++) {
      values[i] = copy_values ? value_copy + int64_t(i) * width : (const E*)(rows.values[i] + value_offset);
      if constexpr (!pairs)
        if (copy_values) widen_row(rows.values[i] + value_offset, a.dv, width, (float*)value_copy + int64_t(i) * width);
    }
#if defined(__AVX512BF16__)
    if constexpr (pairs)
      pair_values((const bf16* const*)rows.values, value_offset, n, a.dv, width, (uint32_t*)value_copy);
#endif
    all_sums<M>(values, scores, value_rows, width, t.lanes, keep, t.sum);
  }
}

static void fold_tile(const Attention& a, int64_t lanes, Partial into, Partial next) {
  const int64_t width = padded(a.dv);
  for (int64_t c = 0; c < lanes; c += W) {
    const F m = max(load(into.m + c), load(next.m + c));
    const F keep = power2(sub(load(into.m + c), m)), take = power2(sub(load(next.m + c), m));
    store(into.m + c, m);
    store(into.l + c, fma(load(next.l + c), take, mul(load(into.l + c), keep)));
    for (int64_t d = 0; d < width; d++) {
      float* sum = into.sum + d * lanes + c;
      store(sum, fma(load(next.sum + d * lanes + c), take, mul(load(sum), keep)));
    }
  }
}

static void write_tile(const Attention& a, const Job& j, Partial p, float* row_memory) {
  const int rows = j.queries * a.group, lanes = tile_lanes(a, j), width = int(padded(a.dv));
  for (int r = 0; r < rows; r += W) {
    F m = load(p.m + r), l = load(p.l + r), factor = set1(1.0f);
    if (a.sinks) {
      float sinks[W];
      for (int i = 0; i < W; i++) sinks[i] = kLog2E * a.sinks[j.head * a.group + (r + i) % a.group];
      const F sink = load(sinks), both = max(m, sink);
      factor = power2(sub(m, both));
      l = fma(l, factor, power2(sub(sink, both)));
    }
    float factors[W];
    store(factors, div(factor, l));
    for (int d = 0; d < width; d += W) {
      F square[W];
      for (int i = 0; i < W; i++) square[i] = load(p.sum + int64_t(d + i) * lanes + r);
      transpose(square);
      for (int i = 0; i < W; i++) store(row_memory + i * width + d, square[i]);
    }
    for (int i = 0; i < W && r + i < rows; i++)
      write_out(a, j.row + (r + i) / a.group, j.head * a.group + (r + i) % a.group, row_memory + i * width, set1(factors[i]));
  }
}

static inline int most_lanes(const Attention& a) { return int(padded(most(kTileLanes, a.group))); }

static size_t tile_scratch(const Attention& a) {
  const size_t lanes = most_lanes(a), width = padded(a.dv), depth = padded(a.dk);
  return depth * lanes * 4 + 2 * lanes * 4 + 2 * lanes * (width + 2) * 4 + W * (width + depth) * 4 + 4 * kTileBlock * 8 +
         kTileBlock * (lanes + depth + width) * 4 + lanes * 4 + 16 * 64;
}

template <class T, class M>
static void run_tile(const Attention& a, const Job& j, int first_chunk, int end_chunk, float* partials, char* memory) {
  constexpr bool pairs = same<typename M::Element, uint32_t>;
  Scratch scratch = {memory};
  Tile t = {};
  t.lanes = tile_lanes(a, j);
  t.depth = pairs ? (a.dk + 1) / 2 : a.dk;
  t.query = scratch.take<float>(int64_t(t.depth) * t.lanes);
  t.last = scratch.take<float>(t.lanes);
  t.first = scratch.take<float>(t.lanes);
  float* row_memory = scratch.take<float>(W * (padded(a.dv) + padded(a.dk)));
  load_tile<pairs>(a, j, t, row_memory);
  const int64_t floats = partial_floats(a, j);
  const Partial whole = partial_at(partials ? partials : scratch.take<float>(floats), t.lanes);
  const Partial next = partial_at(partials ? partials : scratch.take<float>(floats), t.lanes);
  const int64_t base = int64_t(j.first_key / j.chunk_size) * j.chunk_size;
  for (int c = first_chunk; c < end_chunk; c++) {
    const int begin = most(int(base + int64_t(c) * j.chunk_size), j.first_key);
    const int end = least(int(base + int64_t(c + 1) * j.chunk_size), j.end_key);
    const Partial here = partials ? partial_at(partials + c * floats, t.lanes) : c == 0 ? whole : next;
    t.m = here.m;
    t.l = here.l;
    t.sum = here.sum;
    tile_chunk<T, M>(a, j, begin, end, t, scratch);
    if (!partials && c > 0) fold_tile(a, t.lanes, whole, next);
  }
  if (!partials) write_tile(a, j, whole, row_memory);
}
