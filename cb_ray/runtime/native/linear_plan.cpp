#include "linear_plan.h"

#include <algorithm>
#include <atomic>

#include "arena.h"
#include "pool.h"

namespace cb_ray {
namespace {

// Tasks that may run at once; the phases of a call follow each other.
struct Phase {
  int tasks;
  std::function<void(int)> run;
  std::atomic<int> next{0}, done{0};
};

// All phases under one waking of the threads. A thread that comes late finds its work done and passes through.
template <size_t count>
void run_phases(Phase (&phases)[count], int threads, Parallel parallel) {
  int widest = 1;
  for (const Phase& phase : phases) widest = std::max(widest, phase.tasks);
  parallel(std::min(threads, widest), [&phases] {
    for (Phase& phase : phases) {
      for (int t; (t = phase.next.fetch_add(1, std::memory_order_relaxed)) < phase.tasks;) {
        phase.run(t);
        phase.done.fetch_add(1, std::memory_order_release);
      }
      if (phase.done.load(std::memory_order_acquire) < phase.tasks)
        wait_until([&phase] { return phase.done.load(std::memory_order_acquire) == phase.tasks; });
    }
  });
}

constexpr int kSlice = 256;  // elements of a row that are made ready in one task

constexpr int kSlab = 512;  // rows at a time: enough to be bound by arithmetic, few enough to need little memory

// Rows from `first` on, as a product of its own.
Linear slab(Linear l, int first) {
  const int64_t size = l.type == Type::f32 ? 4 : 2;
  const auto skip = [&](const void* at, int64_t row) { return at ? static_cast<const char*>(at) + first * row * size : nullptr; };
  l.x = skip(l.x, l.x_row);
  l.residual = skip(l.residual, l.residual_row);
  l.out = const_cast<char*>(skip(l.out, l.out_row));
  l.rows = std::min(kSlab, l.rows - first);
  return l;
}

size_t ready_bytes(const Linear& l) { return (int64_t(l.rows) + 15) / 16 * 16 * l.depth * sizeof(float); }

// Say where x will be made ready; the number of tasks that do it, 0 where it is ready as it is.
int place(Linear& l, const Kernels& kernels, char* memory) {
  const bool pairs = kernels.pairs(l.type);
  l.few = nullptr;
  l.many = reinterpret_cast<float*>(memory);
  l.many_depth = pairs ? l.depth / 2 : l.depth;
  if (kernels.few(l.rows, l.depth, l.type)) {
    const bool ready = pairs || l.type == Type::f32;
    l.few = ready ? l.x : memory;
    l.few_row = ready ? l.x_row : l.depth;
    if (ready) return 0;
  }
  return (l.depth + kSlice - 1) / kSlice;
}

void prepare(const Linear& l, const Kernels& kernels, int task) {
  kernels.prepare(l, task * kSlice, std::min(l.depth, (task + 1) * kSlice));
}

// Columns of one task: enough tasks to share evenly, each long enough to be worth taking.
int columns_per_task(const Linear& l, int threads) {
  const int64_t fair = l.columns / (8 * threads), small = (1 << 18) / std::max(1, l.depth);  // numbers: some 20 microseconds
  return int(std::min<int64_t>(256, std::max<int64_t>(16, (std::min(fair, small) + 15) / 16 * 16)));
}

int tasks_of(const Linear& l, int threads) {
  const int per = columns_per_task(l, threads);
  return (l.columns + per - 1) / per;
}

void multiply(const Linear& l, const Kernels& kernels, int threads, int task) {
  thread_local Arena wide;
  const int per = columns_per_task(l, threads);
  float* memory = reinterpret_cast<float*>(wide.reserve(size_t(16) * l.depth * sizeof(float)));
  kernels.multiply(l, task * per, std::min(l.columns, (task + 1) * per), memory);
}

size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

void multiply_slab(Linear* linears, int count, const Kernels& kernels, int threads, Parallel parallel) {
  thread_local Arena ready;
  char* memory = ready.reserve(ready_bytes(linears[0]));
  int preparing = 0, tasks = 0;
  for (int i = 0; i < count; i++) {
    preparing = place(linears[i], kernels, memory);
    tasks += tasks_of(linears[i], threads);
  }
  const auto any = [=, &kernels](int task) {
    const Linear* l = linears;
    for (int n; task >= (n = tasks_of(*l, threads)); l++) task -= n;
    multiply(*l, kernels, threads, task);
  };
  Phase phases[] = {{preparing, [=, &kernels](int task) { prepare(linears[0], kernels, task); }}, {tasks, any}};
  run_phases(phases, threads, parallel);
}

void gated_slab(Linear& up, Linear& down, const Kernels& kernels, int threads, Parallel parallel) {
  thread_local Arena ready, between, ready_again;
  up.out = between.reserve(size_t(up.rows) * up.columns * size_of(up.type));
  up.out_row = up.columns;
  down.x = up.out;
  down.x_row = up.columns;
  const int first = place(up, kernels, ready.reserve(ready_bytes(up)));
  const int second = place(down, kernels, ready_again.reserve(ready_bytes(down)));
  Phase phases[] = {
      {first, [&](int task) { prepare(up, kernels, task); }},
      {tasks_of(up, threads), [&](int task) { multiply(up, kernels, threads, task); }},
      {second, [&](int task) { prepare(down, kernels, task); }},
      {tasks_of(down, threads), [&](int task) { multiply(down, kernels, threads, task); }},
  };
  run_phases(phases, threads, parallel);
}

}  // namespace

void multiply_all(const Linear* linears, int count, const Kernels& kernels, int threads, Parallel parallel) {
  for (int first = 0; first < linears[0].rows; first += kSlab) {
    Linear parts[3];
    for (int i = 0; i < count; i++) parts[i] = slab(linears[i], first);
    multiply_slab(parts, count, kernels, threads, parallel);
  }
}

void gated_mlp(const Linear& up, const Linear& down, const Kernels& kernels, int threads, Parallel parallel) {
  for (int first = 0; first < up.rows; first += kSlab) {
    Linear one = slab(up, first), two = slab(down, first);
    gated_slab(one, two, kernels, threads, parallel);
  }
}

}  // namespace cb_ray
