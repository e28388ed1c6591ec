// Compiled last: LEVELS lists the levels that the compiler could make, e.g. -D'LEVELS(X)=X(portable) X(avx2)'.
#include "levels.h"

#include <atomic>
#include <cstring>

#ifndef LEVELS
#define LEVELS(X) X(portable)
#endif

namespace cb_ray {

#define DECLARE(level) extern const Kernels kernels_##level;
LEVELS(DECLARE)
#undef DECLARE

namespace {

bool machine_can(const char* level) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!std::strcmp(level, "avx2")) return avx2;
  if (!std::strcmp(level, "avx512")) return avx512;
  if (!std::strcmp(level, "avx512_bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
  return !std::strcmp(level, "portable");
}

std::vector<const Kernels*> usable_levels() {
  std::vector<const Kernels*> found;
#define ADD(level) \
  if (machine_can(#level)) found.push_back(&kernels_##level);
  LEVELS(ADD)
#undef ADD
  return found;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{levels().back()};
  return kernels;
}

}  // namespace

const std::vector<const Kernels*>& levels() {
  static const std::vector<const Kernels*> found = usable_levels();
  return found;
}

const Kernels& kernels() { return *chosen().load(std::memory_order_relaxed); }

}  // namespace cb_ray

#define PUBLIC extern "C" __attribute__((visibility("default")))

PUBLIC const char* cb_ray_level_name(int index) {
  const auto& all = cb_ray::levels();
  return index >= 0 && index < int(all.size()) ? all[index]->name : nullptr;
}

PUBLIC const char* cb_ray_level() { return cb_ray::kernels().name; }

PUBLIC int cb_ray_force_level(int index) {
  const auto& all = cb_ray::levels();
  if (index < 0 || index >= int(all.size())) return 0;
  cb_ray::chosen().store(all[index]);
  return 1;
}

// Operations made, of float32 (0), bfloat16 (1) or float16 (2) numbers.
PUBLIC double cb_ray_peak(int type, int64_t rounds) { return cb_ray::kernels().peak(cb_ray::Type(type), rounds); }
