// From a batch to tasks of even size, and the threads that take them.
//
// Owns: how a batch is cut into jobs, chunks and tasks, working memory, and who folds. May not know: torch's tensors, vectors.
#pragma once
#include <functional>

#include "attention.h"

namespace cb_ray {

// Run body(worker) on up to `workers` threads at once, returning when all have ended.
using Parallel = void (*)(int workers, const std::function<void()>& body);

struct Batch {
  const int32_t* first_rows;  // [requests + 1], rows of the query
  const int32_t* starts;  // [requests], tokens in the cache before this step
  int requests;
};

void attend(const Attention& a, const Batch& batch, const Kernels& kernels, int threads, Parallel parallel);

}  // namespace cb_ray
