// x times a weight as a model keeps it, row by row: nothing is packed beforehand, so weights cost no second copy and may change.
//
//   few rows of x (`few`):   16 columns at a time; a dot product per row and column, numbers of one weight row in lanes
//   more:                    rows of x in lanes (packed, once per call), weights broadcast pair by pair as they are read
//
// Either way a weight is read from memory once, in the order in which it lies, asked for some 32 or 24 KB ahead, a little
// at a time: the machine's own prefetcher does not keep up with rows read side by side. Few rows are bound by memory, so they ask
// the second-level cache, which has more requests under way at a time. Included by kernels.cpp inside a level's namespace.

constexpr int64_t kDotsAhead = 32768, kLanesAhead = 24576;  // bytes
constexpr int kMostFew = W == 16 ? 28 : 6;

// Whether rows of x are few: a handful, or as many as stay in the first-level cache beside the weights that pass by.
static bool few(int rows, int depth, Type type) {
  return rows <= (W == 16 ? 16 : 6) || (rows <= kMostFew && int64_t(rows) * depth * (pairs(type) ? 2 : 4) <= 32768);
}

// What becomes of 16 columns of one row of x.
template <class T>
static inline F rounded(F x) {
  T stored[W];
  store(stored, x);
  return load(stored);
}
template <>
inline F rounded<float>(F x) {
  return x;
}

static inline F logistic(F x) {  // 1 / (1 + e^-x), with e^-|x| so that nothing overflows
  const F e = exponential(sub(zero(), abs(x))), one = set1(1.0f);
  const F small = div(e, add(one, e));
  return pick_less(x, zero(), small, sub(one, small));
}

static inline F activated(Activation kind, F x) {
  if (kind == Activation::silu) return mul(x, logistic(x));
  // gelu, tanh form: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))
  const F inner = mul(set1(0.797884561f), fma(mul(mul(x, x), x), set1(0.044715f), x));
  return mul(mul(set1(0.5f), x), add(set1(1.0f), hyperbolic_tangent(inner)));
}

// fours[r] = four dot products of row r with four weight rows; meanwhile `share` quarters of what lies `soon` are asked for.
template <class D, int R, int share>
static inline void dot_four(const typename D::Query* x, int64_t x_row, const typename D::Key* const* w, int depth, const char* soon,
                            F* fours) {
  F acc[R][4];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = acc[r][2] = acc[r][3] = zero();
  const typename D::Key *w0 = w[0], *w1 = w[1], *w2 = w[2], *w3 = w[3];
  constexpr int bytes = share * D::step * int(sizeof(typename D::Key));
  for (int d = 0; d < depth; d += D::step) {
#pragma GCC unroll 4
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(soon + i, 0, 2);
    soon += bytes;
    const typename D::Loaded a = D::load_key(w0 + d), b = D::load_key(w1 + d);
    const typename D::Loaded c = D::load_key(w2 + d), e = D::load_key(w3 + d);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const typename D::Loaded q = D::load_query(x + r * x_row + d);
      acc[r][0] = D::dot(acc[r][0], q, a);
      acc[r][1] = D::dot(acc[r][1], q, b);
      acc[r][2] = D::dot(acc[r][2], q, c);
      acc[r][3] = D::dot(acc[r][3], q, e);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) fours[r * 4] = four_sums(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
}

template <class D, int R>
static inline void dot_rows(int rows, int share, const typename D::Query* x, int64_t x_row, const typename D::Key* const* w, int depth,
                            const char* soon, F* fours) {
  if (rows < R) {
    if constexpr (R > 1) dot_rows<D, R - 1>(rows, share, x, x_row, w, depth, soon, fours);
    return;
  }
  if (share == 4) dot_four<D, R, 4>(x, x_row, w, depth, soon, fours);
  if (share == 2) dot_four<D, R, 2>(x, x_row, w, depth, soon, fours);
  if (share == 1) dot_four<D, R, 1>(x, x_row, w, depth, soon, fours);
  if (share == 0) dot_four<D, R, 0>(x, x_row, w, depth, soon, fours);
}

// block[r, 16] = columns n .. n + 15 of x w^T, for at most 16 rows.
template <class D>
static void dot_block(const Linear& l, const void* weight, int n, float* block) {
  using K = typename D::Key;
  using Q = typename D::Query;
  constexpr int most_rows = W == 16 ? 5 : 2;  // what the registers hold
  const Q* x = (const Q*)l.few;
  const int groups = (l.rows + most_rows - 1) / most_rows;
  for (int half = 0; half < 16; half += W) {
    F fours[kMostFew][4];
    for (int g = 0; g < W / 4; g++) {
      const K* w[4];
      for (int i = 0; i < 4; i++) w[i] = (const K*)weight + int64_t(least(n + half + 4 * g + i, l.columns - 1)) * l.weight_row;
      const char* soon = (const char*)w[0] + kDotsAhead;
      for (int group = 0, r = 0; group < groups; group++) {
        const int count = (l.rows - r + groups - group - 1) / (groups - group);
        const int share = group >= 4 ? 0 : groups >= 4 ? 1 : groups == 3 ? (group ? 1 : 2) : 4 / groups;
        dot_rows<D, most_rows>(count, share, x + r * l.few_row, l.few_row, w, l.depth, soon, &fours[r][g]);
        soon += int64_t(share) * l.depth * int(sizeof(K));
        r += count;
      }
    }
    for (int r = 0; r < l.rows; r++) store(block + r * 16 + half, join_sums(fours[r]));
  }
}

// out[i, lanes] = sum over d of w[i][d] * x[d, lanes], for R columns of the answer and C vectors of rows of x.
template <class M, int R, int C, bool ahead>
static inline void lane_four(const typename M::Element* const* w, const float* x, int depth, int lanes, float* out) {
  F acc[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  const typename M::Element* k[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) k[r] = w[r];
  const char* soon = (const char*)k[0] + kLanesAhead;
  constexpr int every = 16 / R;  // R elements of 4 bytes are read at a time: one line in so many steps
  for (int d = 0; d < depth; d++, x += lanes) {
    if (ahead && d % every == 0) {
      __builtin_prefetch(soon, 0, 3);
      soon += 64;
    }
    F q[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) q[c] = load(x + c * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const F y = M::splat(k[r] + d);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) acc[r][c] = M::step(acc[r][c], y, q[c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) store(out + r * lanes + c * W, acc[r][c]);
}

template <class M, bool ahead>
static inline void lane_sixteen(const typename M::Element* const* w, const float* x, int depth, int lanes, float* out) {
  int c = 0;
  for (; c + kWide * W <= lanes; c += kWide * W)
    for (int r = 0; r < 16; r += 4)
      c ? lane_four<M, 4, kWide, false>(w + r, x + c, depth, lanes, out + r * lanes + c)
        : lane_four<M, 4, kWide, ahead>(w + r, x + c, depth, lanes, out + r * lanes + c);
  if constexpr (W == 16) {
    if (lanes - c == 3 * W)
      for (int r = 0; r < 16; r += 4) lane_four<M, 4, 3, ahead>(w + r, x + c, depth, lanes, out + r * lanes + c);
    if (lanes - c == 2 * W)
      for (int r = 0; r < 16; r += 8) lane_four<M, 8, 2, ahead>(w + r, x + c, depth, lanes, out + r * lanes + c);
    if (lanes - c == W) lane_four<M, 16, 1, ahead>(w, x + c, depth, lanes, out + c);
  }
}

// block[r, 16] = columns n .. n + 15 of x w^T, for the rows of one panel of lanes.
template <class T, class M>
static void lane_block(const Linear& l, const void* weight, int n, const float* x, int lanes, float* block, float* wide) {
  using E = typename M::Element;
  constexpr bool widened = sizeof(T) == 2 && same<E, float>;
  const T* rows[16];
  const E* w[16];
  for (int i = 0; i < 16; i++) {
    rows[i] = (const T*)weight + int64_t(least(n + i, l.columns - 1)) * l.weight_row;
    if constexpr (widened) {
      widen_row(rows[i], l.depth, l.depth, wide + int64_t(i) * l.depth);
      w[i] = wide + int64_t(i) * l.depth;
    } else {
      w[i] = (const E*)rows[i];
    }
  }
  alignas(64) float across[16 * kLinearLanes];
  lane_sixteen<M, !widened>(w, x, l.many_depth, lanes, across);
  for (int r = 0; r < lanes; r += W)
    for (int half = 0; half < 16; half += W) {
      F square[W];
      for (int i = 0; i < W; i++) square[i] = load(across + (half + i) * lanes + r);
      transpose(square);
      for (int i = 0; i < W; i++) store(block + (r + i) * 16 + half, square[i]);
    }
}

template <class T>
static inline F load_some(const T* from, int some) {
  if (some == W) return load(from);
  T edge[W] = {};
  for (int k = 0; k < some; k++) edge[k] = from[k];
  return load(edge);
}

// Columns n .. n + 15 of rows first .. of the answer, from the raw products.
template <class T>
static void end_block(const Linear& l, int first, int rows, int n, const float* block, const float* gate) {
  const int width = least(16, l.columns - n);
  for (int r = 0; r < rows; r++) {
    T* out = (T*)l.out + (first + r) * l.out_row + n;
    for (int i = 0; i < width; i += W) {
      const int some = least(W, width - i);
      F y = load(block + r * 16 + i);
      if (l.bias) y = add(y, load_some((const T*)l.bias + n + i, some));
      if (gate) y = mul(rounded<T>(activated(l.activation, rounded<T>(load(gate + r * 16 + i)))), rounded<T>(y));
      if (l.residual) y = add(load_some((const T*)l.residual + (first + r) * l.residual_row + n + i, some), rounded<T>(y));
      if (some == W) {
        store(out + i, y);
        continue;
      }
      T edge[W];
      store(edge, y);
      for (int k = 0; k < some; k++) out[i + k] = edge[k];
    }
  }
}

template <class T, class D, class M>
static void multiply_as(const Linear& l, int begin, int end, float* wide) {
  alignas(64) float block[16 * kLinearLanes], gate[16 * kLinearLanes];
  for (int first = 0; first < l.rows; first += kLinearLanes) {
    const int rows = least(kLinearLanes, l.rows - first), lanes = up_to_multiple(rows, 16);
    const float* x = l.many + int64_t(first) * l.many_depth;
    for (int n = begin; n < end; n += 16) {
      if (l.few) {
        if (l.gate) dot_block<D>(l, l.gate, n, gate);
        dot_block<D>(l, l.weight, n, block);
      } else {
        if (l.gate) lane_block<T, M>(l, l.gate, n, x, lanes, gate, wide);
        lane_block<T, M>(l, l.weight, n, x, lanes, block, wide);
      }
      end_block<T>(l, first, rows, n, block, l.gate ? gate : nullptr);
    }
  }
}

// Make x ready for multiply: elements [begin, end) of each row (multiples of 32), widened, or put into panels of lanes:
// [many_depth, lanes] floats or bf16 pairs each.
template <class T, bool pairs>
static void prepare_as(const Linear& l, int begin, int end) {
  if (l.few) {
    for (int r = 0; r < l.rows; r++)
      widen_row((const T*)l.x + r * l.x_row + begin, end - begin, end - begin, (float*)l.few + r * l.few_row + begin);
    return;
  }
  for (int first = 0; first < l.rows; first += kLinearLanes) {
    const int rows = least(kLinearLanes, l.rows - first), lanes = up_to_multiple(rows, 16);
    float* to = l.many + int64_t(first) * l.many_depth;
    for (int r = 0; r < lanes; r += W)
      for (int d = pairs ? begin / 2 : begin; d < (pairs ? end / 2 : end); d += W) {
        F square[W];
        for (int i = 0; i < W; i++) {
          const T* from = (const T*)l.x + (first + r + i) * l.x_row;
          if (r + i >= rows) square[i] = zero();
          else if constexpr (pairs) square[i] = load((const float*)(from + 2 * d));
          else square[i] = load(from + d);
        }
        transpose(square);
        for (int i = 0; i < W; i++) store(to + int64_t(d + i) * lanes + r, square[i]);
      }
  }
}
