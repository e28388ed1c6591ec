// Memory of one thread that grows and is kept, so that a step allocates nothing.
#pragma once
#include <cstdlib>
#include <new>

namespace cb_ray {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { std::free(memory_); }

  // At least so many bytes, aligned to 64; what was there before may be gone.
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(memory_);
      size_ = (bytes + bytes / 2 + 4095) / 4096 * 4096;
      memory_ = static_cast<char*>(std::aligned_alloc(64, size_));
      if (!memory_) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return memory_;
  }

 private:
  char* memory_ = nullptr;
  size_t size_ = 0;
};

}  // namespace cb_ray
