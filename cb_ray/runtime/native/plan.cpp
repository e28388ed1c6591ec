#include "plan.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "arena.h"

namespace cb_ray {
namespace {

struct Task {
  int job, begin, end;  // chunks
};

struct Plan {
  std::vector<Job> jobs;
  std::vector<Task> tasks;
  std::vector<std::atomic<int>> left;  // tasks of each job not yet done
  Arena partials;
  std::atomic<int> next{0};
};

void add_job(const Attention& a, std::vector<Job>& jobs, Job j) {
  const int last = j.position + j.queries - 1;
  j.end_key = last + 1;
  j.first_key = a.window ? std::max(0, j.position - a.window + 1) : 0;
  j.chunks = (j.end_key - 1) / j.chunk_size - j.first_key / j.chunk_size + 1;
  j.tasks = 1;
  jobs.push_back(j);
}

void add_request(const Attention& a, const Batch& batch, int request, std::vector<Job>& jobs) {
  const int first = batch.first_rows[request], queries = batch.first_rows[request + 1] - first;
  if (queries <= 0) return;
  Job j{};
  j.request = request;
  j.row = first;
  j.queries = queries;
  j.position = batch.starts[request];
  if (queries * a.group <= kStreamRows) {
    j.heads = a.kv_heads;
    j.chunk_size = kStreamChunk;
    add_job(a, jobs, j);
    return;
  }
  j.tiled = true;
  j.heads = 1;
  const int together = std::max(1, kTileLanes / a.group);
  // The last tiles see most keys, so they go first: what is taken last should be small.
  for (int at = (queries - 1) / together * together; at >= 0; at -= together)
    for (int head = 0; head < a.kv_heads; head++) {
      j.head = head;
      j.row = first + at;
      j.position = batch.starts[request] + at;
      j.queries = std::min(together, queries - at);
      j.chunk_size = j.queries * a.group <= 16 ? kShortTileChunk : kTileChunk;
      add_job(a, jobs, j);
    }
}

int64_t cost(const Attention& a, const Job& j) {
  const int64_t rows = j.tiled ? padded(int64_t(j.queries) * a.group) / 4 : 2 + int64_t(j.queries) * a.group;
  return (64 + j.end_key - j.first_key) * rows * j.heads * (a.dk + a.dv);
}

// With so few streams that threads would idle, each kv head becomes a job of its own.
void split_heads(const Attention& a, std::vector<Job>& jobs, int threads) {
  int chunks = 0;
  for (const Job& j : jobs) chunks += j.chunks;
  if (chunks >= 2 * threads || a.kv_heads == 1) return;
  std::vector<Job> split;
  for (const Job& j : jobs) {
    Job part = j;
    part.heads = 1;
    for (int h = 0; h < j.heads; h++) {
      part.head = j.head + h;
      split.push_back(part);
    }
  }
  jobs.swap(split);
}

void cut(const Attention& a, const Batch& batch, int threads, Plan& plan) {
  plan.jobs.clear();
  plan.tasks.clear();
  for (int request = 0; request < batch.requests; request++) add_request(a, batch, request, plan.jobs);
  if (threads > 1) split_heads(a, plan.jobs, threads);
  int64_t total = 0;
  for (const Job& j : plan.jobs) total += cost(a, j);
  const int64_t fair = std::max<int64_t>(total / (8 * threads), 1 << 16);
  int64_t floats = 0;
  for (size_t i = 0; i < plan.jobs.size(); i++) {
    Job& j = plan.jobs[i];
    const int64_t wanted = threads == 1 ? 1 : (cost(a, j) + fair - 1) / fair;
    const int per_task = int((j.chunks + wanted - 1) / wanted);
    j.tasks = (j.chunks + per_task - 1) / per_task;
    if (j.tasks > 1) {
      j.partials = floats;
      floats += partial_floats(a, j) * j.chunks;
    }
    for (int c = 0; c < j.chunks; c += per_task) plan.tasks.push_back({int(i), c, std::min(c + per_task, j.chunks)});
  }
  plan.partials.reserve(floats * sizeof(float));
  if (plan.left.size() < plan.jobs.size()) plan.left = std::vector<std::atomic<int>>(plan.jobs.size() * 2);
  for (size_t i = 0; i < plan.jobs.size(); i++) plan.left[i].store(plan.jobs[i].tasks, std::memory_order_relaxed);
  plan.next.store(0, std::memory_order_relaxed);
}

void work(const Attention& a, const Kernels& kernels, Plan& plan, float* partials) {
  thread_local Arena memory;
  char* scratch = memory.reserve(kernels.scratch(a));
  const int count = int(plan.tasks.size());
  const auto take = [&] { return plan.next.fetch_add(1, std::memory_order_relaxed); };
  const auto stream = [&](int t) { return t < count && !plan.jobs[plan.tasks[t].job].tiled; };
  bool asked = false;
  for (int t = take(), following; t < count; t = following) {
    const Task& task = plan.tasks[t];
    const Job& j = plan.jobs[task.job];
    float* of_job = j.tasks > 1 ? partials + j.partials : nullptr;
    After after = {nullptr, 0, asked};
    following = j.tiled ? count : take();  // streams are short and wait for memory: the next one is chosen beforehand
    asked = !j.tiled && stream(following);
    if (asked) {
      after.job = &plan.jobs[plan.tasks[following].job];
      after.chunk = plan.tasks[following].begin;
    }
    kernels.run(a, j, task.begin, task.end, of_job, scratch, after);
    if (j.tiled) following = take();
    // The last to end folds: it has seen what the others wrote before they counted themselves out.
    if (of_job && plan.left[task.job].fetch_sub(1, std::memory_order_acq_rel) == 1) kernels.finish(a, j, of_job, scratch);
  }
}

}  // namespace

void attend(const Attention& a, const Batch& batch, const Kernels& kernels, int threads, Parallel parallel) {
  thread_local Plan plan;
  cut(a, batch, threads, plan);
  float* partials = reinterpret_cast<float*>(plan.partials.reserve(0));
  Plan& shared = plan;  // thread_local: the workers must see the caller's
  parallel(std::min<int>(threads, int(plan.tasks.size())), [&] { work(a, kernels, shared, partials); });
}

}  // namespace cb_ray
