// Root mean square norms, rounded where the model's own code rounds. Included by kernels.cpp inside a level's namespace.

template <class T>
static void norm_row(const Norm& n, const T* x, T* out) {
  F squares[2] = {zero(), zero()};
  int d = 0;
  for (; d + 2 * W <= n.width; d += 2 * W)
    for (int k = 0; k < 2; k++) {
      const F v = load(x + d + k * W);
      squares[k] = fma(v, v, squares[k]);
    }
  float total = sum(add(squares[0], squares[1]));
  for (; d < n.width; d++) {
    const float v = number_at(x + d);
    total += v * v;
  }
  const F factor = set1(1.0f / __builtin_sqrtf(total / float(n.width) + n.epsilon));
  const T* weight = (const T*)n.weight;
  for (d = 0; d < n.width; d += W) {
    const int some = least(W, n.width - d);
    T edge_x[W] = {}, edge_w[W] = {};
    if (some < W)
      for (int k = 0; k < some; k++) edge_x[k] = x[d + k], edge_w[k] = weight[d + k];
    const F v = mul(load(some < W ? edge_x : x + d), factor), w = load(some < W ? edge_w : weight + d);
    F y = mul(v, w);
    if (n.style == NormStyle::rounded_first) y = mul(rounded<T>(v), w);
    if (n.style == NormStyle::one_plus) y = mul(v, add(set1(1.0f), w));
    if (some == W) {
      store(out + d, y);
      continue;
    }
    store(edge_x, y);
    for (int k = 0; k < some; k++) out[d + k] = edge_x[k];
  }
}

template <class T>
static void norm_rows(const Norm& n, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; r++) norm_row(n, (const T*)n.x + r * n.width, (T*)n.out + r * n.width);
}
