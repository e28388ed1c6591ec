// Products of a step's rows with a model's weights, shared among threads.
//
// Owns: how columns become tasks, the order of what depends on what, and working memory. May not know: torch's tensors, vectors.
#pragma once
#include "plan.h"

namespace cb_ray {

// At most three linears of the same x: out_i = x weight_i^T. x is made ready once.
void multiply_all(const Linear* linears, int count, const Kernels& kernels, int threads, Parallel parallel);

// down(activation(x gate^T) * (x up^T)): `up` has its gate set and no out, `down` no x; what lies between them is kept here.
void gated_mlp(const Linear& up, const Linear& down, const Kernels& kernels, int threads, Parallel parallel);

}  // namespace cb_ray
