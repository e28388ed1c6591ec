// The op of a whole decoder layer: what runs after what, and where it lies in between. Every part is what the ops of its own are.
//
//   x ─▶ norm ─▶ q, k, v ─▶ (norms of heads) ─▶ rotary ─▶ pages, attention ─▶ output, + x ─▶ norm ─▶ gated MLP, + that
#include "arena.h"
#include "cache_ops.h"
#include "linear_arguments.h"

namespace cb_ray {
namespace {

// Working memory of a layer, cut into rows of different widths.
class Between {
 public:
  Between(char* memory, int64_t rows, int64_t size) : next_(memory), rows_(rows), size_(size) {}
  void* take(int64_t width) {
    char* taken = next_;
    next_ += bytes(rows_, width, size_);
    return taken;
  }
  static int64_t bytes(int64_t rows, int64_t width, int64_t size) { return (rows * width * size + 63) / 64 * 64; }

 private:
  char* next_;
  int64_t rows_, size_;
};

Linear product(const void* x, Type type, int64_t rows, int64_t depth) {
  Linear l{};
  l.x = x;
  l.type = type;
  l.rows = int(rows);
  l.depth = int(depth);
  l.x_row = depth;
  STD_TORCH_CHECK(depth % 32 == 0 && depth > 0, "cb_ray: what is multiplied must be a multiple of 32 wide, is ", depth);
  return l;
}

void to(Linear& l, void* out) {
  l.out = out;
  l.out_row = l.columns;
}

void from(Linear& l, const void* residual) {
  l.residual = residual;
  l.residual_row = l.columns;
}

Tensor decoder_layer(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& first_norm, double first_epsilon,
                     int64_t first_style, const Tensor& second_norm, double second_epsilon, int64_t second_style,
                     const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm, double head_epsilon,
                     int64_t head_style, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
                     const std::optional<Tensor>& query_bias, const std::optional<Tensor>& key_bias,
                     const std::optional<Tensor>& value_bias, const std::optional<Tensor>& output_bias, const Tensor& gate,
                     const Tensor& up, const Tensor& down, bool gelu_tanh, Tensor key_cache, Tensor value_cache,
                     const Tensor& slots, const Tensor& block_table, const Tensor& cu_q, const Tensor& starts, double scale,
                     int64_t window, double softcap) {
  STD_TORCH_CHECK(x.dim() >= 2 && x.is_contiguous(), "cb_ray: x must be contiguous, with at least 2 dimensions");
  STD_TORCH_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4, "cb_ray: caches must be [blocks, page, kv_heads, dim]");
  const Type type = type_of(x, "x");
  const int64_t width = x.size(x.dim() - 1), rows = width ? x.numel() / width : 0, size = size_of(type);
  const int64_t heads_of_kv = key_cache.size(2), dk = key_cache.size(3), dv = value_cache.size(3);
  STD_TORCH_CHECK(query.dim() == 2 && dk > 0 && query.size(0) % dk == 0, "cb_ray: the query weight does not give whole heads");
  const int64_t heads = query.size(0) / dk;
  const Kernels& level = kernels();
  const int threads = num_threads();

  thread_local Arena arena;
  int64_t needed = 2 * Between::bytes(rows, width, size);
  for (const int64_t w : {heads * dk, heads_of_kv * dk, heads_of_kv * dv, heads * dv}) needed += Between::bytes(rows, w, size);
  Between memory(arena.reserve(needed), rows, size);
  void *normed = memory.take(width), *middle = memory.take(width), *q = memory.take(heads * dk);
  void *k = memory.take(heads_of_kv * dk), *v = memory.take(heads_of_kv * dv), *mixed = memory.take(heads * dv);

  Norm norm{};
  norm.type = type;
  norm.width = int(width);
  norm.x = x.data_ptr();
  norm.out = normed;
  set_norm(norm, first_norm, first_epsilon, first_style);
  norm_rows(norm, rows);

  Linear three[3] = {product(normed, type, rows, width), product(normed, type, rows, width), product(normed, type, rows, width)};
  set_weight(three[0], query, query_bias);
  set_weight(three[1], key, key_bias);
  set_weight(three[2], value, value_bias);
  STD_TORCH_CHECK(three[1].columns == heads_of_kv * dk && three[2].columns == heads_of_kv * dv,
                  "cb_ray: key and value weights do not fit the cache");
  to(three[0], q);
  to(three[1], k);
  to(three[2], v);
  multiply_all(three, 3, level, threads, in_parallel);

  const std::optional<Tensor>* head_norms[2] = {&query_norm, &key_norm};
  for (int i = 0; i < 2; i++) {
    Rotary turn{};
    turn.x = i ? k : q;
    turn.type = type;
    turn.width = int(dk);
    turn.heads = int(i ? heads_of_kv : heads);
    if (*head_norms[i]) {
      Norm of_heads{};
      of_heads.type = type;
      of_heads.width = int(dk);
      of_heads.x = of_heads.out = turn.x;
      set_norm(of_heads, **head_norms[i], head_epsilon, head_style);
      norm_rows(of_heads, rows * turn.heads);
    }
    set_angles(turn, rows, cos, sin);
    turn_rows(turn, rows);
  }

  const Cache cache = {key_cache, value_cache};
  write_rows({k, type, rows, heads_of_kv, dk, heads_of_kv * dk, dk}, {v, type, rows, heads_of_kv, dv, heads_of_kv * dv, dv}, cache, slots);
  Attention attention{};
  attention.query = q;
  attention.query_row = heads * dk;
  attention.query_head = dk;
  attention.query_type = type;
  attention.heads = int(heads);
  attention.dk = int(dk);
  attention.out = mixed;
  const std::optional<Tensor> no_sinks;
  attend_over(attention, rows, cache, {block_table, cu_q, starts}, {scale, window, softcap, no_sinks});

  Linear out = product(mixed, type, rows, heads * dv);
  set_weight(out, output, output_bias);
  STD_TORCH_CHECK(out.columns == width, "cb_ray: the output weight does not give what x is");
  from(out, x.data_ptr());
  to(out, middle);
  multiply_all(&out, 1, level, threads, in_parallel);

  norm.x = middle;
  set_norm(norm, second_norm, second_epsilon, second_style);
  norm_rows(norm, rows);

  Linear wide = product(normed, type, rows, width);
  set_gated(wide, gate, up, gelu_tanh);
  Linear narrow = product(nullptr, type, rows, wide.columns);
  set_weight(narrow, down, std::nullopt);
  STD_TORCH_CHECK(narrow.columns == width, "cb_ray: the down weight does not give what x is");
  Tensor answer = torch::stable::empty_like(x);
  from(narrow, middle);
  to(narrow, answer.data_ptr());
  gated_mlp(wide, narrow, level, threads, in_parallel);
  return answer;
}

}  // namespace
}  // namespace cb_ray

STABLE_TORCH_LIBRARY_FRAGMENT(cb_ray, m) {
  m.def(
      "decoder_layer(Tensor x, Tensor cos, Tensor sin, Tensor first_norm, float first_epsilon, int first_style, "
      "Tensor second_norm, float second_epsilon, int second_style, Tensor? query_norm, Tensor? key_norm, float head_epsilon, "
      "int head_style, Tensor query, Tensor key, Tensor value, Tensor output, Tensor? query_bias, Tensor? key_bias, "
      "Tensor? value_bias, Tensor? output_bias, Tensor gate, Tensor up, Tensor down, bool gelu_tanh, Tensor(a!) key_cache, "
      "Tensor(b!) value_cache, Tensor slots, Tensor block_table, Tensor cu_q, Tensor starts, float scale, int window, "
      "float softcap) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cb_ray, CPU, m) { m.impl("decoder_layer", TORCH_BOX(&cb_ray::decoder_layer)); }
