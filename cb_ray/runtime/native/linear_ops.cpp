// The torch ops that multiply a step's few rows with a model's weights, and norm them: what arguments may be.
#include <algorithm>
#include <optional>
#include <tuple>

#include "arguments.h"
#include "levels.h"
#include "linear_plan.h"

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

const void* weight_of(const Tensor& weight, const Linear& l, const char* name) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == l.depth && weight.stride(1) == 1 && type_of(weight, name) == l.type,
                  "cb_ray: ", name, " must be [columns, ", l.depth, "] of the type of x, its rows contiguous");
  return weight.data_ptr();
}

void set_weight(Linear& l, const Tensor& weight, const std::optional<Tensor>& bias) {
  l.weight = weight_of(weight, l, "weight");
  l.weight_row = weight.stride(0);
  l.columns = int(weight.size(0));
  if (!bias) return;
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == l.columns && bias->is_contiguous() && type_of(*bias, "bias") == l.type,
                  "cb_ray: bias must be a contiguous vector of ", l.columns, " numbers of the type of x");
  l.bias = bias->data_ptr();
}

void set_residual(Linear& l, const std::optional<Tensor>& residual) {
  if (!residual) return;
  STD_TORCH_CHECK(residual->is_contiguous() && residual->numel() == int64_t(l.rows) * l.columns && type_of(*residual, "residual") == l.type,
                  "cb_ray: residual must be contiguous, of the answer's shape and type");
  l.residual = residual->data_ptr();
  l.residual_row = l.columns;
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
  set_weight(first, up, std::nullopt);
  first.gate = weight_of(gate, first, "gate");
  first.activation = gelu_tanh ? Activation::gelu_tanh : Activation::silu;
  STD_TORCH_CHECK(gate.size(0) == up.size(0) && gate.stride(0) == up.stride(0), "cb_ray: gate and up must have the same shape");
  STD_TORCH_CHECK(first.columns % 32 == 0, "cb_ray: the width of the mlp must be a multiple of 32, is ", first.columns);
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
  STD_TORCH_CHECK(x.dim() > 0 && weight.dim() == 1 && weight.is_contiguous() && weight.size(0) == x.size(x.dim() - 1) &&
                      type_of(weight, "weight") == type_of(x, "x"),
                  "cb_ray: weight must be a vector as long as the last dimension of x, of its type");
  STD_TORCH_CHECK(style >= 0 && style <= 2, "cb_ray: style must be 0, 1 or 2, is ", style);
  Norm n{};
  n.x = x.data_ptr();
  n.weight = weight.data_ptr();
  n.type = type_of(x, "x");
  n.style = NormStyle(style);
  n.width = int(weight.size(0));
  n.epsilon = float(epsilon);
  Tensor out = torch::stable::empty_like(x);
  n.out = out.data_ptr();
  const int64_t rows = n.width ? x.numel() / n.width : 0, grain = std::max<int64_t>(1, (1 << 16) / std::max(1, n.width));
  const Kernels& level = kernels();
  const auto some = [&](int64_t begin, int64_t end) { level.norm(n, begin, end); };
  share(rows, grain, some);
  return out;
}

void turn_one(const Tensor& x, const Tensor& cos, const Tensor& sin, const char* name) {
  STD_TORCH_CHECK(x.dim() >= 2 && x.is_contiguous(), "cb_ray: ", name, " must be contiguous [..., heads, width]");
  Rotary r{};
  r.x = x.data_ptr();
  r.type = type_of(x, name);
  r.width = int(x.size(x.dim() - 1));
  r.heads = int(x.size(x.dim() - 2));
  r.cos = cos.data_ptr();
  r.sin = sin.data_ptr();
  r.angle_type = type_of(cos, "cos");
  r.turned = int(cos.size(cos.dim() - 1));
  const int64_t rows = r.heads && r.width ? x.numel() / (int64_t(r.heads) * r.width) : 0;
  STD_TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.numel() == rows * r.turned && sin.numel() == cos.numel() &&
                      type_of(sin, "sin") == r.angle_type && (r.angle_type == r.type || r.angle_type == Type::f32),
                  "cb_ray: cos and sin must be contiguous [", rows, ", even], of the type of ", name, " or float32");
  STD_TORCH_CHECK(r.turned % 2 == 0 && r.turned <= r.width, "cb_ray: ", r.turned, " of ", r.width, " numbers cannot be turned");
  const Kernels& level = kernels();
  const auto some = [&](int64_t begin, int64_t end) { level.turn(r, begin, end); };
  const int64_t grain = std::max<int64_t>(1, (1 << 16) / std::max(1, r.heads * r.width));
  share(rows, grain, some);
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
