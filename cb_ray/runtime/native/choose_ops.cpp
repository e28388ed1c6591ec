// The torch ops that choose a step's tokens: what arguments may be.
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

}  // namespace
}  // namespace cb_ray

STABLE_TORCH_LIBRARY_FRAGMENT(cb_ray, m) {
  m.def("greatest(Tensor logits) -> (Tensor, Tensor)");
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor fewest, Tensor numbers) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(cb_ray, CPU, m) {
  m.impl("greatest", TORCH_BOX(&cb_ray::greatest));
  m.impl("sample", TORCH_BOX(&cb_ray::sample));
}
