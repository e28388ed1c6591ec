// The torch ops of attention, and what their arguments may be; nothing of how they are computed.
//
// Written against torch's stable C ABI: it compiles in a second, and what it builds runs under every torch from 2.11 on.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "cache_ops.h"
#include "levels.h"

namespace cb_ray {
namespace {

// ---- arguments ----

void check_cache(const Tensor& cache, const char* name) {
  STD_TORCH_CHECK(cache.dim() == 4, "cb_ray: ", name, " must be [blocks, page, kv_heads, dim], has ", cache.dim(), " dimensions");
  STD_TORCH_CHECK(cache.stride(3) == 1 && cache.stride(2) == cache.size(3) && cache.stride(1) == cache.size(2) * cache.size(3),
                  "cb_ray: the inner three dimensions of ", name, " must be contiguous");
}

const int32_t* integers(const Tensor& t, const char* name, int64_t dims, int64_t size) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == dims && t.size(0) == size && (size <= 1 || dims == 2 || t.stride(0) == 1),
                  "cb_ray: ", name, " must be a contiguous int32 tensor with ", dims, " dimensions and ", size, " rows");
  return static_cast<const int32_t*>(t.data_ptr());
}

std::vector<float> floats(const Tensor& t, int64_t size) {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size, "cb_ray: sinks must hold one number for each of ", size, " heads");
  const Type type = type_of(t, "sinks");
  std::vector<float> out(size);
  for (int64_t i = 0; i < size; i++) {
    const char* at = static_cast<const char*>(t.data_ptr()) + i * t.stride(0) * (type == Type::f32 ? 4 : 2);
    if (type == Type::f32) {
      std::memcpy(&out[i], at, 4);
    } else {
      uint16_t bits;
      std::memcpy(&bits, at, 2);
      out[i] = type == Type::bf16 ? torch::headeronly::BFloat16(bits, torch::headeronly::BFloat16::from_bits())
                                  : torch::headeronly::Half(bits, torch::headeronly::Half::from_bits());
    }
  }
  return out;
}

// Where the rows of a key or value tensor come from and go to.
struct Scatter {
  const char* source;
  char* target;
  int64_t from_row, from_head;  // bytes, like all of these
  int64_t block, line;  // line: one head's
  int64_t heads, page, slots, rows;
  bool together;  // the heads of a row lie side by side

  char* place(int64_t slot) const { return target + slot / page * block + slot % page * heads * line; }

  void ask(int64_t slot) const {
    char* to = place(slot);
    for (int64_t at = 0; at < heads * line + 63; at += 64) __builtin_prefetch(to + at, 1, 3);
  }

  void copy(int64_t row, int64_t slot) const {
    char* to = place(slot);
    const char* from = source + row * from_row;
    if (together) std::memcpy(to, from, heads * line);
    else
      for (int64_t h = 0; h < heads; h++) std::memcpy(to + h * line, from + h * from_head, line);
  }
};

Scatter scatter_of(const Source& from, const Tensor& cache, const Tensor& slots, const char* name) {
  check_cache(cache, "a cache");
  const int64_t size = size_of(from.type), heads = cache.size(2), width = cache.size(3);
  STD_TORCH_CHECK(from.rows >= slots.size(0) && from.heads == heads && from.width == width && type_of(cache, "a cache") == from.type,
                  "cb_ray: ", name, " must be [rows, ", heads, ", ", width, "] of the cache's type, its last dimension contiguous");
  Scatter s{};
  s.source = static_cast<const char*>(from.data);
  s.target = static_cast<char*>(cache.data_ptr());
  s.from_row = from.row * size;
  s.from_head = from.head * size;
  s.block = cache.stride(0) * size;
  s.line = width * size;
  s.heads = heads;
  s.page = cache.size(1);
  s.slots = cache.size(0) * s.page;
  s.rows = slots.size(0);
  s.together = from.head == width;
  return s;
}

// Returns a row whose slot does not exist, or -1. The slots of a step lie scattered and cold: asking for the lines of later rows
// while a row is copied is worth a factor of five.
template <class Slot>
int64_t copy_rows(const Scatter& keys, const Scatter& values, const Slot* slots, int64_t begin, int64_t end) {
  constexpr int64_t ahead = 16;
  int64_t bad = -1;
  const auto fits = [&](int64_t r) { return slots[r] >= 0 && slots[r] < keys.slots && slots[r] < values.slots; };
  for (int64_t r = begin - ahead; r < end; r++) {
    if (r + ahead < end && fits(r + ahead)) {
      keys.ask(slots[r + ahead]);
      values.ask(slots[r + ahead]);
    }
    if (r < begin) continue;
    if (!fits(r)) {
      bad = r;
      continue;
    }
    keys.copy(r, slots[r]);
    values.copy(r, slots[r]);
  }
  return bad;
}

}  // namespace

// Everything of a call but its rows of queries and its answer, which `a` has.
void attend_over(Attention a, int64_t rows, const Cache& cache, const Rows& step, const Shape& shape) {
  const Tensor &key_cache = cache.keys, &value_cache = cache.values, &block_table = step.block_table;
  check_cache(key_cache, "key_cache");
  check_cache(value_cache, "value_cache");
  a.keys = key_cache.data_ptr();
  a.values = value_cache.data_ptr();
  a.key_block = key_cache.stride(0);
  a.value_block = value_cache.stride(0);
  a.cache_type = type_of(key_cache, "key_cache");
  a.kv_heads = int(key_cache.size(2));
  a.dv = int(value_cache.size(3));
  a.page = int(key_cache.size(1));
  a.num_blocks = int(key_cache.size(0));
  STD_TORCH_CHECK(a.dk == key_cache.size(3) && a.kv_heads == value_cache.size(2) && a.page == value_cache.size(1) &&
                      a.num_blocks == value_cache.size(0) && a.cache_type == type_of(value_cache, "value_cache"),
                  "cb_ray: query, key_cache and value_cache do not fit together");
  STD_TORCH_CHECK(a.kv_heads > 0 && a.heads % a.kv_heads == 0, "cb_ray: ", a.heads, " heads cannot share ", a.kv_heads, " kv heads");
  a.group = a.heads / a.kv_heads;
  Batch batch{};
  batch.requests = int(block_table.size(0));
  a.tables = integers(block_table, "block_table", 2, batch.requests);
  a.table_row = block_table.stride(0);
  STD_TORCH_CHECK(block_table.stride(1) == 1 || block_table.size(1) <= 1, "cb_ray: rows of block_table must be contiguous");
  batch.first_rows = integers(step.cu_q, "cu_q", 1, batch.requests + 1);
  batch.starts = integers(step.starts, "starts", 1, batch.requests);
  const int64_t reach = block_table.size(1) * a.page;
  int64_t used = batch.requests ? batch.first_rows[0] : 0;
  STD_TORCH_CHECK(used == 0, "cb_ray: cu_q must begin with 0");
  for (int b = 0; b < batch.requests; b++) {
    const int64_t count = batch.first_rows[b + 1] - used;
    STD_TORCH_CHECK(count >= 0 && used + count <= rows, "cb_ray: cu_q must rise and end within the ", rows, " rows of the query");
    STD_TORCH_CHECK(!count || (batch.starts[b] >= 0 && batch.starts[b] + count <= reach), "cb_ray: request ", b, " has ",
                    batch.starts[b], " + ", count, " tokens, its block table reaches ", reach);
    used += count;
  }
  a.scale = float(shape.scale);
  a.softcap = float(shape.softcap);
  a.window = int(shape.window);
  std::vector<float> sink_floats;
  if (shape.sinks) {
    sink_floats = floats(*shape.sinks, a.heads);
    a.sinks = sink_floats.data();
  }
  int32_t bad_block[2] = {0, 0};
  a.bad_block = bad_block;
  const int64_t row_bytes = int64_t(a.heads) * a.dv * size_of(a.query_type);
  std::memset(static_cast<char*>(a.out) + used * row_bytes, 0, (rows - used) * row_bytes);
  attend(a, batch, kernels(), num_threads(), in_parallel);
  STD_TORCH_CHECK(!bad_block[0], "cb_ray: entry ", bad_block[1], " of block table row ", bad_block[0] - 1,
                  " is not one of the ", a.num_blocks, " blocks");
}

void write_rows(const Source& key, const Source& value, const Cache& cache, const Tensor& slots) {
  const bool wide = slots.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(slots.dim() == 1 && (slots.size(0) <= 1 || slots.stride(0) == 1) && (wide || slots.scalar_type() == ScalarType::Int),
                  "cb_ray: slots must be a contiguous int32 or int64 vector");
  const Scatter keys = scatter_of(key, cache.keys, slots, "key"), values = scatter_of(value, cache.values, slots, "value");
  const void* places = slots.data_ptr();
  std::atomic<int64_t> bad{-1};
  const auto copy = [&](int64_t begin, int64_t end) {
    const int64_t found = wide ? copy_rows(keys, values, static_cast<const int64_t*>(places), begin, end)
                               : copy_rows(keys, values, static_cast<const int32_t*>(places), begin, end);
    if (found >= 0) bad.store(found, std::memory_order_relaxed);
  };
  const int64_t bytes = keys.heads * keys.line + values.heads * values.line;
  const int64_t worth = own_threads.load(std::memory_order_relaxed) ? 1 << 14 : 1 << 17;  // below, waking a thread costs more
  const int64_t grain = std::max<int64_t>(1, worth / std::max<int64_t>(bytes, 1));
  share(keys.rows, grain, copy);
  STD_TORCH_CHECK(bad.load() < 0, "cb_ray: slot of row ", bad.load(), " lies outside the ", keys.slots, " slots of the cache");
}

namespace {

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                       const Tensor& cu_q, const Tensor& starts, double scale, int64_t window, double softcap,
                       const std::optional<Tensor>& sinks) {
  check_cache(value_cache, "value_cache");
  STD_TORCH_CHECK(query.dim() == 3, "cb_ray: query must be [rows, heads, dim], has ", query.dim(), " dimensions");
  if (query.size(2) > 1 && query.stride(2) != 1)
    return paged_attention(torch::stable::contiguous(query), key_cache, value_cache, block_table, cu_q, starts, scale, window,
                           softcap, sinks);
  Attention a{};
  a.query = query.data_ptr();
  a.query_row = query.stride(0);
  a.query_head = query.stride(1);
  a.query_type = type_of(query, "query");
  a.heads = int(query.size(1));
  a.dk = int(query.size(2));
  Tensor out = empty({query.size(0), a.heads, value_cache.size(3)}, dtype_of(query));
  a.out = out.data_ptr();
  attend_over(a, query.size(0), {key_cache, value_cache}, {block_table, cu_q, starts}, {scale, window, softcap, sinks});
  return out;
}

Source source_of(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3 && (t.size(2) == 1 || t.stride(2) == 1), "cb_ray: ", name,
                  " must be [rows, heads, dim], its last dimension contiguous");
  return {t.data_ptr(), type_of(t, name), t.size(0), t.size(1), t.size(2), t.stride(0), t.stride(1)};
}

void write_kv(const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache, const Tensor& slots) {
  write_rows(source_of(key, "key"), source_of(value, "value"), {key_cache, value_cache}, slots);
}

Tensor write_and_attend(const Tensor& query, const Tensor& key, const Tensor& value, Tensor key_cache, Tensor value_cache,
                        const Tensor& slots, const Tensor& block_table, const Tensor& cu_q, const Tensor& starts, double scale,
                        int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  write_kv(key, value, key_cache, value_cache, slots);
  return paged_attention(query, key_cache, value_cache, block_table, cu_q, starts, scale, window, softcap, sinks);
}

}  // namespace
}  // namespace cb_ray

STABLE_TORCH_LIBRARY_FRAGMENT(cb_ray, m) {
  m.def(
      "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor cu_q, Tensor starts, "
      "float scale, int window, float softcap, Tensor? sinks) -> Tensor");
  m.def("write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots) -> ()");
  m.def(
      "write_and_attend(Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slots, "
      "Tensor block_table, Tensor cu_q, Tensor starts, float scale, int window, float softcap, Tensor? sinks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(cb_ray, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&cb_ray::paged_attention));
  m.impl("write_kv", TORCH_BOX(&cb_ray::write_kv));
  m.impl("write_and_attend", TORCH_BOX(&cb_ray::write_and_attend));
}
