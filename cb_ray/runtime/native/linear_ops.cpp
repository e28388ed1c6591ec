// The torch ops that multiply a step's few rows with a model's weights, and norm them: what arguments may be.
#include <algorithm>
#include <optional>
#include <tuple>

#include "arguments.h"
#include "levels.h"
#include "linear_arguments.h"

namespace cb_ray {
namespace {

// Rows of x and their number, whatever the dimensions before the last.
Linear rows_of(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() >= 2 && x.is_contiguous(), "cb_ray: x must be contiguous, with at least 2 dimensions");
  Linear l{};
  l.x = x.data_ptr();
  l.type = type_of(x, "x");
  l.depth = int(x.size(x.dim() - 1));
  l.rows = int(l.depth ? x.numel() / l.depth : 0);
  l.x_row = l.depth;
  STD_TORCH_CHECK(l.depth % 32 == 0 && l.depth > 0, "cb_ray: the last dimension of x must be a multiple of 32, is ", l.depth);
  return l;
}

// The answer's memory: as x, but for the last dimension.
Tensor answer(Linear& l, const Tensor& x) {
  const int64_t dims = x.dim();
  int64_t sizes[8], strides[8], stride = 1;
  STD_TORCH_CHECK(dims <= 8, "cb_ray: x has ", dims, " dimensions");
  for (int64_t i = dims; i-- > 0; stride *= sizes[i]) {
    sizes[i] = i == dims - 1 ? l.columns : x.size(i);
    strides[i] = stride;
  }
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, dtype_of(x), aoti_torch_device_type_cpu(), 0, &made));
  Tensor out(made);
  l.out = out.data_ptr();
  l.out_row = l.columns;
  return out;
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& residual) {
  Linear l = rows_of(x);
  set_weight(l, weight, bias);
  set_residual(l, residual);
  Tensor out = answer(l, x);
  multiply_all(&l, 1, kernels(), num_threads(), in_parallel);
  return out;
}

std::tuple<Tensor, Tensor, Tensor> linear_qkv(const Tensor& x, const Tensor& query, const Tensor& key, const Tensor& value,
                                              const std::optional<Tensor>& query_bias, const std::optional<Tensor>& key_bias,
                                              const std::optional<Tensor>& value_bias) {
  Linear l[3] = {rows_of(x), rows_of(x), rows_of(x)};
  set_weight(l[0], query, query_bias);
  set_weight(l[1], key, key_bias);
  set_weight(l[2], value, value_bias);
  std::tuple<Tensor, Tensor, Tensor> out = {answer(l[0], x), answer(l[1], x), answer(l[2], x)};
  multiply_all(l, 3, kernels(), num_threads(), in_parallel);
  return out;
}

Tensor gated_mlp_op(const Tensor& x, const Tensor& gate, const Tensor& up, const Tensor& down, bool gelu_tanh,
                    const std::optional<Tensor>& residual) {
  Linear first = rows_of(x), second{};
  set_gated(first, gate, up, gelu_tanh);
  second.type = first.type;
  second.rows = first.rows;
  second.depth = first.columns;
  set_weight(second, down, std::nullopt);
  set_residual(second, residual);
  Tensor out = answer(second, x);
  gated_mlp(first, second, kernels(), num_threads(), in_parallel);
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double epsilon, int64_t style) {
  if (!x.is_contiguous()) return rms_norm(torch::stable::contiguous(x), weight, epsilon, style);
  STD_TORCH_CHECK(x.dim() > 0, "cb_ray: x must have a dimension");
  Norm n{};
  n.x = x.data_ptr();
  n.type = type_of(x, "x");
  n.width = int(x.size(x.dim() - 1));
  set_norm(n, weight, epsilon, style);
  Tensor out = torch::stable::empty_like(x);
  n.out = out.data_ptr();
  norm_rows(n, n.width ? x.numel() / n.width : 0);
  return out;
}

void turn_one(const Tensor& x, const Tensor& cos, const Tensor& sin, const char* name) {
  STD_TORCH_CHECK(x.dim() >= 2 && x.is_contiguous(), "cb_ray: ", name, " must be contiguous [..., heads, width]");
  Rotary r{};
  r.x = x.data_ptr();
  r.type = type_of(x, name);
  r.width = int(x.size(x.dim() - 1));
  r.heads = int(x.size(x.dim() - 2));
  const int64_t rows = r.heads && r.width ? x.numel() / (int64_t(r.heads) * r.width) : 0;
  set_angles(r, rows, cos, sin);
  turn_rows(r, rows);
}

void rotary_(Tensor query, Tensor key, const Tensor& cos, const Tensor& sin) {
  turn_one(query, cos, sin, "query");
  turn_one(key, cos, sin, "key");
}

}  // namespace
}  // namespace cb_ray

// How many threads calls share on our own helpers (pool.h), 0 for torch's pool; returns what was before.
extern "C" __attribute__((visibility("default"))) int cb_ray_own_threads(int count) {
  return cb_ray::own_threads.exchange(std::max(0, count));
}

STABLE_TORCH_LIBRARY_FRAGMENT(cb_ray, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual) -> Tensor");
  m.def(
      "linear_qkv(Tensor x, Tensor query, Tensor key, Tensor value, Tensor? query_bias, Tensor? key_bias, Tensor? value_bias) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("gated_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, bool gelu_tanh, Tensor? residual) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float epsilon, int style) -> Tensor");
  m.def("rotary_(Tensor(a!) query, Tensor(b!) key, Tensor cos, Tensor sin) -> ()");
}


STABLE_TORCH_LIBRARY_IMPL(cb_ray, CPU, m) {
  m.impl("linear", TORCH_BOX(&cb_ray::linear));
  m.impl("linear_qkv", TORCH_BOX(&cb_ray::linear_qkv));
  m.impl("gated_mlp", TORCH_BOX(&cb_ray::gated_mlp_op));
  m.impl("rms_norm", TORCH_BOX(&cb_ray::rms_norm));
  m.impl("rotary_", TORCH_BOX(&cb_ray::rotary_));
}
