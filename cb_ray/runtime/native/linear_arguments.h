// Weights, biases, norms and angles as plain pointers, with a reason where they will not do; small work on rows, shared out.
#pragma once
#include <algorithm>
#include <optional>

#include "arguments.h"
#include "levels.h"
#include "linear_plan.h"

namespace cb_ray {

inline const void* weight_of(const Tensor& weight, const Linear& l, const char* name) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) == l.depth && weight.stride(1) == 1 && type_of(weight, name) == l.type,
                  "cb_ray: ", name, " must be [columns, ", l.depth, "] of the type of x, its rows contiguous");
  return weight.data_ptr();
}

inline void set_weight(Linear& l, const Tensor& weight, const std::optional<Tensor>& bias) {
  l.weight = weight_of(weight, l, "weight");
  l.weight_row = weight.stride(0);
  l.columns = int(weight.size(0));
  if (!bias) return;
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == l.columns && bias->is_contiguous() && type_of(*bias, "bias") == l.type,
                  "cb_ray: bias must be a contiguous vector of ", l.columns, " numbers of the type of x");
  l.bias = bias->data_ptr();
}

inline void set_gated(Linear& up_of, const Tensor& gate, const Tensor& up, bool gelu_tanh) {
  set_weight(up_of, up, std::nullopt);
  up_of.gate = weight_of(gate, up_of, "gate");
  up_of.activation = gelu_tanh ? Activation::gelu_tanh : Activation::silu;
  STD_TORCH_CHECK(gate.size(0) == up.size(0) && gate.stride(0) == up.stride(0), "cb_ray: gate and up must have the same shape");
  STD_TORCH_CHECK(up_of.columns % 32 == 0, "cb_ray: the width of the mlp must be a multiple of 32, is ", up_of.columns);
}

inline void set_residual(Linear& l, const std::optional<Tensor>& residual) {
  if (!residual) return;
  STD_TORCH_CHECK(residual->is_contiguous() && residual->numel() == int64_t(l.rows) * l.columns && type_of(*residual, "residual") == l.type,
                  "cb_ray: residual must be contiguous, of the answer's shape and type");
  l.residual = residual->data_ptr();
  l.residual_row = l.columns;
}

// Rows worth a thread's waking, of so many numbers each: our own threads are awake anyway.
inline int64_t rows_together(int64_t width) {
  return std::max<int64_t>(1, (own_threads.load(std::memory_order_relaxed) ? 1 << 13 : 1 << 16) / std::max<int64_t>(1, width));
}

inline void set_norm(Norm& n, const Tensor& weight, double epsilon, int64_t style) {
  STD_TORCH_CHECK(weight.dim() == 1 && weight.is_contiguous() && weight.size(0) == n.width && type_of(weight, "weight") == n.type,
                  "cb_ray: the weight of a norm must be a vector as long as the last dimension of x, of its type");
  STD_TORCH_CHECK(style >= 0 && style <= 2, "cb_ray: style must be 0, 1 or 2, is ", style);
  n.weight = weight.data_ptr();
  n.style = NormStyle(style);
  n.epsilon = float(epsilon);
}

inline void norm_rows(const Norm& n, int64_t rows) {
  const Kernels& level = kernels();
  share(rows, rows_together(n.width), [&](int64_t begin, int64_t end) { level.norm(n, begin, end); });
}

inline void set_angles(Rotary& r, int64_t rows, const Tensor& cos, const Tensor& sin) {
  r.cos = cos.data_ptr();
  r.sin = sin.data_ptr();
  r.angle_type = type_of(cos, "cos");
  r.turned = int(cos.size(cos.dim() - 1));
  STD_TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.numel() == rows * r.turned && sin.numel() == cos.numel() &&
                      type_of(sin, "sin") == r.angle_type && (r.angle_type == r.type || r.angle_type == Type::f32),
                  "cb_ray: cos and sin must be contiguous [", rows, ", even], of the type of what is turned or float32");
  STD_TORCH_CHECK(r.turned % 2 == 0 && r.turned <= r.width, "cb_ray: ", r.turned, " of ", r.width, " numbers cannot be turned");
}

inline void turn_rows(const Rotary& r, int64_t rows) {
  const Kernels& level = kernels();
  share(rows, rows_together(int64_t(r.heads) * r.width), [&](int64_t begin, int64_t end) { level.turn(r, begin, end); });
}

}  // namespace cb_ray
