// Rotary position embedding in place, each product and the sum rounded as the model's own code rounds them. Included by
// kernels.cpp inside a level's namespace.
//
//   first half  = first * cos - second * sin          of the leading `turned` numbers of a head; the rest stays
//   second half = second * cos + first * sin

template <class T, class C>
static inline void turn_some(T* first, T* second, const C* cos_first, const C* cos_second, const C* sin_first, const C* sin_second) {
  const F a = load(first), b = load(second);
  store(first, sub(rounded<T>(mul(a, load(cos_first))), rounded<T>(mul(b, load(sin_first)))));
  store(second, add(rounded<T>(mul(b, load(cos_second))), rounded<T>(mul(a, load(sin_second)))));
}

template <class T, class C>
static void turn_rows(const Rotary& r, int64_t begin, int64_t end) {
  const int half = r.turned / 2;
  for (int64_t row = begin; row < end; row++) {
    const C *cos = (const C*)r.cos + row * r.turned, *sin = (const C*)r.sin + row * r.turned;
    for (int h = 0; h < r.heads; h++) {
      T* x = (T*)r.x + (row * r.heads + h) * r.width;
      int d = 0;
      for (; d + W <= half; d += W) turn_some<T, C>(x + d, x + half + d, cos + d, cos + half + d, sin + d, sin + half + d);
      if (d == half) continue;
      T edge[2][W] = {};
      C factor[4][W] = {};
      const int some = half - d;
      for (int k = 0; k < some; k++) {
        edge[0][k] = x[d + k], edge[1][k] = x[half + d + k];
        factor[0][k] = cos[d + k], factor[1][k] = cos[half + d + k];
        factor[2][k] = sin[d + k], factor[3][k] = sin[half + d + k];
      }
      turn_some<T, C>(edge[0], edge[1], factor[0], factor[1], factor[2], factor[3]);
      for (int k = 0; k < some; k++) x[d + k] = edge[0][k], x[half + d + k] = edge[1][k];
    }
  }
}

template <class T>
static void turn_as(const Rotary& r, int64_t begin, int64_t end) {
  if (r.angle_type == r.type) return turn_rows<T, T>(r, begin, end);
  turn_rows<T, float>(r, begin, end);
}
