// Helper threads that are not waited for unless they are at work.
//
//   caller  ── open ─▶ works until nothing is left ─▶ close ─▶ waits for those inside
//   helper             comes when the system lets it; inside, works on the same tasks; too late: goes back to sleep
//
// OpenMP's regions, which torch's own pool is made of, end when every thread has come, and on a machine with other work to do
// one that has no processor keeps the others waiting for milliseconds at each of the hundred calls of a step. Here it is simply
// absent. One that loses its processor in the middle of a task is waited for; where that takes a third of the time, helpers are left
// alone for a while, longer each time: a step is little slower than on one thread. They spin for a moment after each call, as the
// next is near.
#pragma once
#include <functional>

namespace cb_ray {

// Run `body` on the caller and on up to workers - 1 helpers; it must share its work out so that any number of them will do.
// A caller that finds the helpers with another caller works alone.
void run_in_pool(int workers, const std::function<void()>& body);

// Spin until `done`, which another thread brings about that is at work already. A wait much longer than any task means that the
// system took the processor from that thread: the pool counts it, where the caller waits.
void wait_until(const std::function<bool()>& done);

}  // namespace cb_ray
