// Attention over a cache of pages and writing to it, for ops that have their queries, keys and values in memory of their own.
#pragma once
#include <optional>

#include "arguments.h"

namespace cb_ray {

struct Cache {
  const Tensor &keys, &values;  // [blocks, page, kv_heads, dim], contiguous but for the stride of their blocks
};

struct Rows {
  const Tensor &block_table, &cu_q, &starts;
};

struct Shape {
  double scale;
  int64_t window;
  double softcap;
  const std::optional<Tensor>& sinks;
};

// Keys or values of a step: [rows, heads, width], strides in elements, the last dimension contiguous.
struct Source {
  const void* data;
  Type type;
  int64_t rows, heads, width, row, head;
};

// `a` has the queries, their type and shape, and where the answer goes; what else it has is not read.
void attend_over(Attention a, int64_t rows, const Cache& cache, const Rows& step, const Shape& shape);

// Row r goes to slot slots[r].
void write_rows(const Source& key, const Source& value, const Cache& cache, const Tensor& slots);

}  // namespace cb_ray
