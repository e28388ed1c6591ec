// The dispatch levels that were compiled, and the one in use.
#pragma once
#include <vector>

#include "attention.h"

namespace cb_ray {
// Those that this machine can run, plainest first.
const std::vector<const Kernels*>& levels();
// The widest of them, unless another is forced.
const Kernels& kernels();
}  // namespace cb_ray
