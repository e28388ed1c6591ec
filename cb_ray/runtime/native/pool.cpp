#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

namespace cb_ray {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpin = std::chrono::microseconds(100);  // longer than the gap between two calls of a layer

constexpr auto kStall = std::chrono::microseconds(300);  // and a quarter of the call so far: tasks are shorter than that

// Helpers rest while waiting for them takes more of a call than this, which is about what they are good for where memory bounds.
constexpr double kTooMuch = 0.3;
constexpr auto kWindow = std::chrono::milliseconds(20);  // of calls with helpers, over which that is judged, older ones half as much

thread_local bool is_caller = false;

inline void breathe() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

class Pool;
Pool*& the_pool();

class Pool {
 public:
  void run(int workers, const std::function<void()>& body) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn.owns_lock() || workers <= 1 || Clock::now() < alone_until_.load()) return body();
    lost_ = Clock::duration::zero();
    is_caller = true;
    began_.store(Clock::now());
    grow(workers - 1);
    body_.store(&body);
    {
      std::lock_guard<std::mutex> lock(sleep_);
      wanted_ = workers - 1;
      call_.fetch_add(1);
    }
    if (asleep_.load()) wake_.notify_all();
    struct Close {  // also when body throws: helpers must not outlive what it refers to
      Pool& pool;
      ~Close() {
        pool.body_.store(nullptr);
        wait_until([this] { return pool.inside_.load() == 0; });
        is_caller = false;
        pool.learn();
      }
    } close{*this};
    body();
  }

  void lose(Clock::duration time) { lost_ += time; }
  Clock::time_point began() const { return began_.load(); }

 private:
  // A helper counts itself in before it looks whether the call is still open, and the caller closes before it counts: either
  // the caller sees the helper, or the helper sees that it is late.
  void help(int index, long call) {
    for (;;) {
      call = wait_for_call(call);
      inside_.fetch_add(1);
      const std::function<void()>* body = body_.load();
      if (body && index < wanted_.load()) (*body)();
      inside_.fetch_sub(1);
    }
  }

  long wait_for_call(long last) {
    for (const auto end = Clock::now() + kSpin; Clock::now() < end;)
      for (int i = 0; i < 32; i++) {
        if (const long call = call_.load(std::memory_order_relaxed); call != last) return call;
        breathe();
      }
    std::unique_lock<std::mutex> lock(sleep_);
    asleep_.fetch_add(1);
    wake_.wait(lock, [&] { return call_.load() != last; });
    asleep_.fetch_sub(1);
    return call_.load();
  }

  // One stall is no reason to do without helpers, many are. Rests are longer each time, until a window has passed without one.
  void learn() {
    const auto now = Clock::now();
    with_helpers_ += now - began_.load();
    waited_ += lost_;
    const bool full = with_helpers_ > kWindow, rests = waited_ > kTooMuch * std::max<Clock::duration>(with_helpers_, kWindow / 2);
    if (rests) {
      alone_until_.store(now + rest_);
      rest_ = std::min(2 * rest_, kLongRest);
      with_helpers_ = waited_ = Clock::duration::zero();
    } else if (full) {
      rest_ = kShortRest;
      with_helpers_ /= 2;
      waited_ /= 2;
    }
  }

  void grow(int helpers) {
    for (; helpers_ < helpers; helpers_++) {
      try {
        std::thread(&Pool::help, this, helpers_, call_.load()).detach();
      } catch (const std::system_error&) {
        return;  // the system gives no more threads; those there are will do
      }
    }
  }

  static constexpr auto kShortRest = std::chrono::milliseconds(20), kLongRest = std::chrono::milliseconds(640);

  std::mutex turn_, sleep_;
  std::condition_variable wake_;
  std::atomic<const std::function<void()>*> body_{nullptr};
  std::atomic<long> call_{0};
  std::atomic<int> wanted_{0}, inside_{0}, asleep_{0};
  std::atomic<Clock::time_point> began_{Clock::time_point{}}, alone_until_{Clock::time_point{}};
  // The caller's own, in turn:
  Clock::duration lost_{}, waited_{}, with_helpers_{};  // by stalls of this call; by those of the window, and all of its calls
  std::chrono::milliseconds rest_ = kShortRest;
  int helpers_ = 0;
};

// Never destroyed: helpers may still be about to sleep when the process ends. After a fork the child begins with a new one, as
// it has none of the helpers.
Pool*& the_pool() {
  static Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, [] { the_pool() = new Pool; });
    return new Pool;
  }();
  return pool;
}

}  // namespace

void wait_until(const std::function<bool()>& done) {
  Pool* pool = the_pool();
  const auto from = Clock::now(), stalled = from + kStall + (from - pool->began()) / 4;
  while (!done())
    if (Clock::now() > stalled) {
      while (!done()) breathe();
      if (is_caller) pool->lose(Clock::now() - from);
    } else {
      for (int i = 0; i < 32 && !done(); i++) breathe();
    }
}

void run_in_pool(int workers, const std::function<void()>& body) { the_pool()->run(workers, body); }

}  // namespace cb_ray
