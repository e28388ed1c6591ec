// The kernels of one dispatch level. Compiled several times, each with other machine flags and its own LEVEL name.
//
// Owns: which kernel the types of a call get, and the small ones that need no file of their own. May not know: torch, threads, where a batch came from.
#include "attention.h"

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define NAME_(x) #x
#define NAME(x) NAME_(x)
#define SYMBOL_(x) kernels_##x
#define SYMBOL(x) SYMBOL_(x)

namespace cb_ray {
namespace LEVEL {
namespace {

#include "simd.h"
//
#include "pages.h"
//
#include "stream.h"
//
#include "tiles.h"
bool pairs(Type type) {
#if defined(__AVX512BF16__)
  return type == Type::bf16;
#else
  (void)type;
  return false;
#endif
}

//
#include "linear.h"

#include "choose.h"
//
#include "norm.h"
//
#include "rotary.h"

size_t scratch(const Attention& a) {
  const size_t stream = stream_scratch(a), tile = tile_scratch(a);
  return stream > tile ? stream : tile;
}

template <class T>
void run_as(const Attention& a, const Job& j, int begin, int end, float* partials, char* memory, After after) {
#if defined(__AVX512BF16__)
  if constexpr (same<T, bf16>)
    if (a.query_type == Type::bf16) {
      if (j.tiled) return run_tile<bf16, Pairs>(a, j, begin, end, partials, memory);
      return run_stream<bf16, PairDots>(a, j, begin, end, partials, memory, after);
    }
#endif
  if (j.tiled) return run_tile<T, Floats>(a, j, begin, end, partials, memory);
  run_stream<T, WidenedDots<T>>(a, j, begin, end, partials, memory, after);
}

void run(const Attention& a, const Job& j, int begin, int end, float* partials, char* memory, After after) {
  switch (a.cache_type) {
    case Type::f32: return run_as<float>(a, j, begin, end, partials, memory, after);
    case Type::bf16: return run_as<bf16>(a, j, begin, end, partials, memory, after);
    case Type::f16: return run_as<f16>(a, j, begin, end, partials, memory, after);
  }
}

void finish(const Attention& a, const Job& j, float* partials, char* memory) {
  const int64_t floats = partial_floats(a, j);
  const int64_t rows = j.tiled ? tile_lanes(a, j) : int64_t(j.queries) * a.group * j.heads;
  const Partial whole = partial_at(partials, rows);
  for (int c = 1; c < j.chunks; c++) {
    const Partial next = partial_at(partials + c * floats, rows);
    if (j.tiled) fold_tile(a, rows, whole, next);
    else fold_stream(a, rows, whole, next);
  }
  if (j.tiled) write_tile(a, j, whole, (float*)memory);
  else write_stream(a, j, whole);
}

void prepare(const Linear& l, int begin, int end) {
  switch (l.type) {
    case Type::f32: return prepare_as<float, false>(l, begin, end);
    case Type::bf16: return pairs(l.type) ? prepare_as<bf16, true>(l, begin, end) : prepare_as<bf16, false>(l, begin, end);
    case Type::f16: return prepare_as<f16, false>(l, begin, end);
  }
}

void multiply(const Linear& l, int begin, int end, float* wide) {
#if defined(__AVX512BF16__)
  if (l.type == Type::bf16) return multiply_as<bf16, PairDots, Pairs>(l, begin, end, wide);
#endif
  switch (l.type) {
    case Type::f32: return multiply_as<float, WidenedDots<float>, Floats>(l, begin, end, wide);
    case Type::bf16: return multiply_as<bf16, WidenedDots<bf16>, Floats>(l, begin, end, wide);
    case Type::f16: return multiply_as<f16, WidenedDots<f16>, Floats>(l, begin, end, wide);
  }
}

void norm(const Norm& n, int64_t begin, int64_t end) {
  switch (n.type) {
    case Type::f32: return norm_rows<float>(n, begin, end);
    case Type::bf16: return norm_rows<bf16>(n, begin, end);
    case Type::f16: return norm_rows<f16>(n, begin, end);
  }
}

void turn(const Rotary& r, int64_t begin, int64_t end) {
  switch (r.type) {
    case Type::f32: return turn_as<float>(r, begin, end);
    case Type::bf16: return turn_as<bf16>(r, begin, end);
    case Type::f16: return turn_as<f16>(r, begin, end);
  }
}

void choose(const Choice& c, int64_t begin, int64_t end, float* memory) {
  switch (c.type) {
    case Type::f32: return choose_as<float>(c, begin, end, memory);
    case Type::bf16: return choose_as<bf16>(c, begin, end, memory);
    case Type::f16: return choose_as<f16>(c, begin, end, memory);
  }
}

template <class M>
double peak_as(int64_t rounds, int pairs) {
  constexpr int sums = W >= 8 ? 12 : 6;  // enough to hide how long one takes, few enough for the registers
  typename M::Element numbers[2] = {};
  F acc[sums], x = M::splat(numbers), y = zero();
  for (int i = 0; i < sums; i++) acc[i] = zero();
  for (int64_t n = 0; n < rounds; n++) {
#if defined(__x86_64__)
    asm volatile("" : "+x"(x));  // it might have changed, for all the compiler knows
#else
    asm volatile("" : "+m"(x));
#endif
#pragma GCC unroll 12
    for (int i = 0; i < sums; i++) acc[i] = M::step(acc[i], x, y);
  }
  F total = zero();
  for (int i = 0; i < sums; i++) total = add(total, acc[i]);
  volatile float kept = sum(total);  // lest the compiler sees that nobody wants it
  (void)kept;
  return 2.0 * W * pairs * sums * double(rounds);
}

double peak(Type type, int64_t rounds) {
#if defined(__AVX512BF16__)
  if (type == Type::bf16) return peak_as<Pairs>(rounds, 2);
#endif
  (void)type;
  return peak_as<Floats>(rounds, 1);
}

}  // namespace
}  // namespace LEVEL

extern const Kernels SYMBOL(LEVEL);
const Kernels SYMBOL(LEVEL) = {NAME(LEVEL),    LEVEL::scratch,  LEVEL::run,  LEVEL::finish,  LEVEL::pairs, LEVEL::few,
                                LEVEL::prepare, LEVEL::multiply, LEVEL::norm, LEVEL::turn, LEVEL::choose,
                                LEVEL::peak};

}  // namespace cb_ray
