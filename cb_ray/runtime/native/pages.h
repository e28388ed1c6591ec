// Where keys and values lie. Included by kernels.cpp inside a level's namespace.

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

struct Scratch {
  char* next;
  template <class T>
  T* take(int64_t count) {
    T* taken = (T*)next;
    next += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return taken;
  }
};

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int most(int a, int b) { return a > b ? a : b; }
static inline int up_to_multiple(int n, int of) { return (n + of - 1) / of * of; }

template <class T>
struct Rows {
  const T** keys;  // first element of each key, head 0
  const T** values;
};

// Point at the keys and values of positions [begin, end); pad with copies of the last to a multiple of `align`.
template <class T>
static void find_rows(const Attention& a, const Job& j, int begin, int end, int align, Rows<T> rows) {
  const int32_t* table = a.tables + j.request * a.table_row;
  const int64_t key_token = int64_t(a.kv_heads) * a.dk, value_token = int64_t(a.kv_heads) * a.dv;
  int n = 0, index = begin / a.page, slot = begin % a.page;
  for (int position = begin; position < end; index++, slot = 0) {
    int64_t block = table[index];
    if (block < 0 || block >= a.num_blocks) {
      a.bad_block[0] = j.request + 1;
      a.bad_block[1] = index;
      block = 0;
    }
    const T* key = (const T*)a.keys + block * a.key_block + slot * key_token;
    const T* value = (const T*)a.values + block * a.value_block + slot * value_token;
    const int stop = least(end, position + a.page - slot);
    for (; position < stop; position++, n++, key += key_token, value += value_token) {
      rows.keys[n] = key;
      rows.values[n] = value;
    }
  }
  for (const int padded = up_to_multiple(n, align); n < padded; n++) {
    rows.keys[n] = rows.keys[n - 1];
    rows.values[n] = rows.values[n - 1];
  }
}

// `width` numbers as floats, zeros behind them up to `padded`, a multiple of W.
template <class T>
static inline void widen_row(const T* from, int width, int padded, float* to) {
  int d = 0;
  for (; d + W <= width; d += W) store(to + d, load(from + d));
  if (d < padded) {
    T rest[W] = {};
    for (int i = 0; d + i < width; i++) rest[i] = from[d + i];
    store(to + d, load(rest));
    for (d += W; d < padded; d += W) store(to + d, zero());
  }
}

static inline void widen_query(const Attention& a, int64_t row, int head, int padded, float* to) {
  const int64_t at = row * a.query_row + head * a.query_head;
  switch (a.query_type) {
    case Type::f32: return widen_row((const float*)a.query + at, a.dk, padded, to);
    case Type::bf16: return widen_row((const bf16*)a.query + at, a.dk, padded, to);
    case Type::f16: return widen_row((const f16*)a.query + at, a.dk, padded, to);
  }
}

template <class T>
static inline void narrow_row(const float* from, F factor, int width, T* to) {
  int d = 0;
  for (; d + W <= width; d += W) store(to + d, mul(load(from + d), factor));
  if (d < width) {
    T rest[W];
    store(rest, mul(load(from + d), factor));
    for (int i = 0; d + i < width; i++) to[d + i] = rest[i];
  }
}

// Write one row of the answer: `from` has dv floats and room to read a whole last vector.
static inline void write_out(const Attention& a, int64_t row, int head, const float* from, F factor) {
  const int64_t at = (row * a.heads + head) * a.dv;
  switch (a.query_type) {
    case Type::f32: return narrow_row(from, factor, a.dv, (float*)a.out + at);
    case Type::bf16: return narrow_row(from, factor, a.dv, (bf16*)a.out + at);
    case Type::f16: return narrow_row(from, factor, a.dv, (f16*)a.out + at);
  }
}

// Scores are kept as powers of two, e^x = 2^(x log2(e)): the factor is part of the scale. Those that no query may see get this:
// finite, so that no difference of two of them is NaN, and so far down that its power is 0 as soon as one real score is there.
constexpr float kHidden = -1e38f;
constexpr float kLog2E = 1.44269504f;

struct Shape {
  F scale, cap, cap_inverse;
  bool capped;
};
static inline Shape shape_of(const Attention& a) {
  const bool capped = a.softcap > 0;
  return {set1(capped ? a.scale : a.scale * kLog2E), set1(a.softcap * kLog2E), set1(capped ? 1.0f / a.softcap : 0.0f), capped};
}
static inline F shape_scores(F raw, Shape s) {
  const F x = mul(raw, s.scale);
  return s.capped ? mul(hyperbolic_tangent(mul(x, s.cap_inverse)), s.cap) : x;
}
