// What the driver and the kernels of every dispatch level agree on: plain structs, no torch, no inline code.
//
//   one call = jobs          a job is a run of queries of one request and a range of kv heads
//   one job = chunks         a chunk is a fixed range of key positions; its result is a *partial*: m, l and the weighted sum
//   one task = some chunks   what one thread takes at a time
//
// Chunks depend on nothing but the row itself and are always folded in order, so an answer is the same to the last bit
// however many threads there are and whoever else is in the batch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace cb_ray {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
enum class Type { f32, bf16, f16 };

// All strides are in elements.
struct Attention {
  const void* query;  // [rows, heads, dk], the last dimension contiguous
  int64_t query_row, query_head;
  Type query_type;
  void* out;  // [rows, heads, dv], contiguous, of the query's type
  const void* keys;
  const void* values;  // [blocks, page, kv_heads, dk or dv], contiguous but for the blocks
  int64_t key_block, value_block;
  Type cache_type;
  int heads, kv_heads, group;  // group = heads / kv_heads
  int dk, dv, page, num_blocks;
  const int32_t* tables;  // [requests, max_blocks]
  int64_t table_row;
  const float* sinks;  // [heads] or null
  float scale, softcap;  // softcap 0: none
  int window;  // 0: none
  int32_t* bad_block;  // {request + 1, index in its table}, written when a table names a block that does not exist
};

struct Job {
  int request;
  int64_t row;  // of its first query
  int queries;
  int position;  // of its first query
  int head, heads;  // kv heads
  bool tiled;  // queries in lanes (tiles.h), or keys in lanes (stream.h)
  int first_key, end_key;  // visible to at least one query
  int chunk_size, chunks;
  int tasks;  // that it is cut into
  int64_t partials;  // where its partials begin, in floats; used when tasks > 1
};

// What a thread does after a task of a stream, so that memory can be asked for it: a stream again, or null.
struct After {
  const Job* job;
  int chunk;  // its first
  bool asked;  // whether the task itself was announced like this
};

enum class Activation { silu, gelu_tanh };

// out = x weight^T, and what a model does right after it, rounded where the model would round:
// out = residual + (activation(x gate^T) * (x weight^T + bias)). Null: left out. Strides are in elements.
struct Linear {
  const void* x;  // [rows, depth]
  int64_t x_row;
  const void* weight;  // [columns, depth]
  const void* gate;  // as weight
  int64_t weight_row;
  const void* bias;  // [columns]
  const void* residual;  // [rows, columns]
  int64_t residual_row;
  void* out;  // [rows, columns]
  int64_t out_row;
  Type type;  // of all of them
  Activation activation;
  int rows, depth, columns;
  // x as the kernels want it, made by `prepare`: for few rows floats or x itself, for many rows panels of lanes.
  const void* few;  // [rows, few_row], or null
  int64_t few_row;
  float* many;  // panels of kLinearLanes rows, each [many_depth, rows rounded up to 16]
  int many_depth;
};

// out = x / sqrt(mean(x^2) + epsilon), times a weight: where that is rounded differs between models.
enum class NormStyle {
  rounded_first,  // round(round(x / rms) * weight)
  rounded_last,  // round(x / rms * weight)
  one_plus,  // round(x / rms * (1 + weight))
};
struct Norm {
  const void* x;  // [rows, width], contiguous
  const void* weight;  // [width]
  void* out;
  Type type;
  NormStyle style;
  int width;
  float epsilon;
};

struct Rotary {
  void* x;  // [rows, heads, width], contiguous, changed in place
  const void* cos;  // [rows, turned]
  const void* sin;
  Type type, angle_type;  // the angles' is x's or f32
  int heads, width, turned;
};

// One token of each row of logits. Temperature 0: the greatest. Nothing to cut: top_k 0, top_p 1, min_p 0.
struct Choice {
  const void* logits;
  Type type;
  int64_t stride, columns;
  const float* temperature;
  const int32_t* top_k;  // ties with the k-th stay
  const float* top_p;  // what adds up to at most 1 - top_p goes, least likely first
  const float* min_p;  // what is less likely than this times the likeliest goes
  const int32_t* fewest;  // that top_p leaves
  const double* numbers;  // uniform in [0, 1)
  float* best;  // the greatest logit of each row; NaN where there is one
  int64_t* tokens;
};

struct Kernels {
  const char* name;
  // Bytes of working memory that one task needs.
  size_t (*scratch)(const Attention&);
  // Chunks [begin, end). `partials` holds one partial per chunk of the job; null: the job is this task, write its answer.
  void (*run)(const Attention&, const Job&, int begin, int end, float* partials, char* scratch, After after);
  // Fold the partials of all chunks, in order, and write the answer.
  void (*finish)(const Attention&, const Job&, float* partials, char* scratch);
  // Whether numbers of a type are multiplied in pairs, and whether so many rows of x are few.
  bool (*pairs)(Type);
  bool (*few)(int rows, int depth, Type);
  // Elements [begin, end) of every row of x, multiples of 32.
  void (*prepare)(const Linear&, int begin, int end);
  // Columns [begin, end), begin a multiple of 16. `wide` holds 16 * depth floats.
  void (*multiply)(const Linear&, int begin, int end, float* wide);
  // Rows [begin, end).
  void (*norm)(const Norm&, int64_t begin, int64_t end);
  void (*turn)(const Rotary&, int64_t begin, int64_t end);
  // Rows [begin, end). `memory` holds 3 * (columns + 128) floats.
  void (*choose)(const Choice&, int64_t begin, int64_t end, float* memory);
  // Multiplies numbers of a type and adds them up, nothing read or written, and says how often: a roof to measure others against.
  double (*peak)(Type, int64_t rounds);
};

constexpr int kStreamRows = 7;  // up to so many query rows per kv head, keys go in lanes; above, queries do
constexpr int kStreamChunk = 128;  // keys
constexpr int kTileLanes = 64;  // query rows (queries * group) of a tile, unless one query alone has more
constexpr int kTileBlock = 64;  // keys a tile looks at in one go
constexpr int kTileChunk = 2048;  // keys
constexpr int kShortTileChunk = 256;  // keys, for tiles of at most 16 rows: few rows over a long past is what needs splitting

constexpr int kLinearLanes = 64;  // rows of x multiplied at a time

constexpr int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }
// Floats of one partial: rows of m, rows of l, and rows * dv of the sum, rows and dv rounded up to 16.
inline constexpr int64_t partial_floats(const Attention& a, const Job& j) {
  const int64_t rows = padded(int64_t(j.queries) * a.group * j.heads);
  return rows * (padded(a.dv) + 2);
}

}  // namespace cb_ray
