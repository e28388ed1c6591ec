// What the op files share: torch's tensors as plain pointers, with a reason where they will not do.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>

#include "attention.h"
#include "plan.h"
#include "pool.h"

namespace cb_ray {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Type type_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return Type::f32;
    case ScalarType::BFloat16: return Type::bf16;
    case ScalarType::Half: return Type::f16;
    default: STD_TORCH_CHECK(false, "cb_ray: ", name, " must be float32, bfloat16 or float16");
  }
}

inline int64_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// How many threads calls share, if on our own helpers: one or the other for all of a process, lest the idle spinners of one
// pool disturb the other.
inline std::atomic<int> own_threads{0};  // 0: torch's pool

inline int num_threads() {
  if (const int own = own_threads.load(std::memory_order_relaxed)) return own;
  uint32_t threads = 1;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return int(threads);
}

inline void in_parallel(int workers, const std::function<void()>& body) {
  if (workers <= 1) return body();
  if (own_threads.load(std::memory_order_relaxed)) return run_in_pool(workers, body);
  const auto call = [](int64_t begin, int64_t end, void* context) {
    for (; begin < end; begin++) (*static_cast<const std::function<void()>*>(context))();
  };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, workers, 1, call, const_cast<std::function<void()>*>(&body)));
}

// body(begin, end) over [0, count), in pieces of `grain`; on the caller alone where one piece is all.
template <class Body>
void share(int64_t count, int64_t grain, const Body& body) {
  if (count <= grain) return count ? body(int64_t(0), count) : void();
  std::atomic<int64_t> next{0};
  in_parallel(int(std::min<int64_t>(num_threads(), (count + grain - 1) / grain)), [&] {
    for (int64_t at; (at = next.fetch_add(grain)) < count;) body(at, std::min(count, at + grain));
  });
}

// An uninitialised contiguous CPU tensor; `dtype` as aoti_torch_dtype_* has it.
inline Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
  int64_t strides[8], stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= sizes.begin()[i]) strides[i] = stride;
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(int64_t(sizes.size()), sizes.begin(), strides, dtype, aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

inline int32_t dtype_of(const Tensor& t) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
  return dtype;
}

}  // namespace cb_ray
