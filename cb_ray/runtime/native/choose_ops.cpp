// The torch ops that choose a step's tokens, and forbid some: what arguments may be.
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "arena.h"
#include "arguments.h"
#include "levels.h"

namespace cb_ray {
namespace {

// A contiguous vector of one entry per row.
template <class T>
const T* entries(const Tensor& t, ScalarType type, int64_t rows, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == type && t.dim() == 1 && t.size(0) == rows && t.is_contiguous(), "cb_ray: ", name,
                  " must be a contiguous vector of ", rows, " entries, temperature, top_p and min_p of float32, top_k and fewest of ",
                  "int32, numbers of float64");
  return static_cast<const T*>(t.data_ptr());
}

std::tuple<Tensor, Tensor> answer(Choice& c, int64_t rows) {
  Tensor best = empty({rows}, aoti_torch_dtype_float32()), tokens = empty({rows}, aoti_torch_dtype_int64());
  c.best = static_cast<float*>(best.data_ptr());
  c.tokens = static_cast<int64_t*>(tokens.data_ptr());
  const Kernels& level = kernels();
  share(rows, std::max<int64_t>(1, (1 << 16) / c.columns), [&](int64_t begin, int64_t end) {
    thread_local Arena memory;
    level.choose(c, begin, end, reinterpret_cast<float*>(memory.reserve(3 * (c.columns + 128) * sizeof(float))));
  });
  return {best, tokens};
}

Choice of(const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "cb_ray: logits must be [rows, vocabulary]");
  STD_TORCH_CHECK(logits.size(1) == 1 || logits.stride(1) == 1, "cb_ray: each row of logits must be contiguous");
  Choice c{};
  c.logits = logits.data_ptr();
  c.type = type_of(logits, "logits");
  c.stride = logits.stride(0);
  c.columns = logits.size(1);
  return c;
}

std::tuple<Tensor, Tensor> greatest(const Tensor& logits) {
  Choice c = of(logits);
  const int64_t rows = logits.size(0);
  const std::vector<float> cold(rows, 0.0f);
  c.temperature = cold.data();
  return answer(c, rows);
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                                  const Tensor& min_p, const Tensor& fewest, const Tensor& numbers) {
  Choice c = of(logits);
  const int64_t rows = logits.size(0);
  c.temperature = entries<float>(temperature, ScalarType::Float, rows, "temperature");
  c.top_k = entries<int32_t>(top_k, ScalarType::Int, rows, "top_k");
  c.top_p = entries<float>(top_p, ScalarType::Float, rows, "top_p");
  c.min_p = entries<float>(min_p, ScalarType::Float, rows, "min_p");
  c.fewest = entries<int32_t>(fewest, ScalarType::Int, rows, "fewest");
  c.numbers = entries<double>(numbers, ScalarType::Double, rows, "numbers");
  return answer(c, rows);
}

// -inf as a number of two or four bytes.
template <class Bits>
void forbid_row(Bits* row, int64_t columns, const uint32_t* allowed, Bits infinity) {
  for (int64_t word = 0, at = 0; at < columns; word++, at += 32) {
    const int64_t count = std::min<int64_t>(32, columns - at);
    if (const uint32_t bits = allowed[word]; bits == 0)
      std::fill_n(row + at, count, infinity);
    else if (bits != 0xFFFFFFFFu)  // one after the other: words that allow all or nothing are nearly all of them
      for (int64_t i = 0; i < count; i++) row[at + i] = bits >> i & 1 ? row[at + i] : infinity;
  }
}

void forbid_(Tensor logits, const Tensor& places, const Tensor& allowed) {
  const Choice c = of(logits);
  const int64_t rows = logits.size(0), count = places.size(0);
  STD_TORCH_CHECK(places.scalar_type() == ScalarType::Long && places.dim() == 1 && places.is_contiguous(),
                  "cb_ray: places must be a contiguous vector of int64");
  STD_TORCH_CHECK(allowed.scalar_type() == ScalarType::Int && allowed.dim() == 2 && allowed.is_contiguous() &&
                      allowed.size(0) == count && allowed.size(1) * 32 >= c.columns,
                  "cb_ray: allowed must be int32 [", count, ", words], with a bit for each of ", c.columns, " logits");
  const auto* place = static_cast<const int64_t*>(places.data_ptr());
  for (int64_t i = 0; i < count; i++)
    STD_TORCH_CHECK(place[i] >= 0 && place[i] < rows, "cb_ray: place ", place[i], " is none of ", rows, " rows");
  const auto* masks = static_cast<const uint32_t*>(allowed.data_ptr());
  const int64_t words = allowed.size(1);
  void* const numbers = logits.data_ptr();
  share(count, std::max<int64_t>(1, (1 << 17) / c.columns), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t first = place[i] * c.stride;
      if (c.type == Type::f32)
        forbid_row<uint32_t>(static_cast<uint32_t*>(numbers) + first, c.columns, masks + i * words, 0xFF800000u);
      else
        forbid_row<uint16_t>(static_cast<uint16_t*>(numbers) + first, c.columns, masks + i * words,
                             c.type == Type::bf16 ? 0xFF80 : 0xFC00);
    }
  });
}

}  // namespace
}  // namespace cb_ray

STABLE_TORCH_LIBRARY_FRAGMENT(cb_ray, m) {
  m.def("greatest(Tensor logits) -> (Tensor, Tensor)");
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor fewest, Tensor numbers) -> "
      "(Tensor, Tensor)");
  m.def("forbid_(Tensor(a!) logits, Tensor places, Tensor allowed) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(cb_ray, CPU, m) {
  m.impl("greatest", TORCH_BOX(&cb_ray::greatest));
  m.impl("sample", TORCH_BOX(&cb_ray::sample));
  m.impl("forbid_", TORCH_BOX(&cb_ray::forbid_));
}
