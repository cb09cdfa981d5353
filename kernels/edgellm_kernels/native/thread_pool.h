// The threads that share a kernel's work: parallel_for over tasks, spinning while there is work, asleep after two
// milliseconds without any.
//
// Beside torch. Torch's own threads (OpenMP) wait asleep while no parallel torch op runs, and these workers sleep
// or spin for at most two milliseconds while no native op runs. Whoever runs every op here keeps torch to one
// thread, so at any moment at most one of the two pools has runnable threads. One pool per process is enough:
// calls from several threads take turns.
//
// Which thread runs a task never changes a result: a task computes its own outputs, whole, in a fixed order. Every
// thread first takes the tasks of its own share (task * threads / tasks), in order, and then helps the others, so a
// thread that the system has taken off its core delays only the task that it is in. In a child made by fork(), whose
// only thread is the one that forked, a pool starts its workers anew at the first call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace edgellm {

class Pool {
 public:
  // The caller is one of the `threads` (at least 1, at most kMaxThreads).
  explicit Pool(int64_t threads);
  // Ends and joins the workers; no call may be in progress.
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  static constexpr int64_t kMaxThreads = 1024;

  int64_t threads() const { return num_threads_; }

  // body(task) or body(task, thread) for every task of 0 .. tasks - 1 (fewer than 2^32), with thread in 0 ..
  // threads() - 1 for scratch memory of its own. Returns when all are done. Called from inside a task it runs its
  // tasks one after another as thread 0: what uses scratch by thread must not nest.
  template <class F> void parallel_for(int64_t tasks, F&& body) {
    using Body = std::remove_reference_t<F>;
    run(
        tasks,
        [](void* context, int64_t task, int64_t thread) {
          Body& function = *static_cast<Body*>(context);
          if constexpr (std::is_invocable_v<Body&, int64_t, int64_t>) {
            function(task, thread);
          } else {
            (void)thread;
            function(task);
          }
        },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
  }

  // Workers that are asleep now.
  int64_t sleeping() const { return sleepers_.load(std::memory_order_relaxed); }

 private:
  using Body = void (*)(void* context, int64_t task, int64_t thread);

  // The next task of one thread's share: the job's number in the high half, the task in the low one, so that a
  // thread that comes late for a finished job cannot take a task of the next.
  struct alignas(64) Share {
    std::atomic<uint64_t> next{0};
  };

  // Locks that a forked child may find held by threads that it does not have; it gets new ones.
  struct Locks {
    std::mutex call, sleep;
    std::condition_variable wake;
  };

  friend struct LivePools;
  void run(int64_t tasks, Body body, void* context);
  void start_workers();
  void work(int64_t thread);
  // False when the pool ends.
  bool wait_for_job(uint64_t seen);
  // Runs what is left of job `number`, if it is still the current one.
  void help(uint64_t number, int64_t thread);

  const int64_t num_threads_;
  std::unique_ptr<Share[]> shares_;
  std::unique_ptr<std::vector<std::thread>> workers_;
  std::unique_ptr<Locks> locks_;
  bool started_ = false;

  // A job is published like a seqlock: its number is odd while its fields are written.
  alignas(64) std::atomic<uint64_t> number_{0};
  std::atomic<int64_t> tasks_{0};
  std::atomic<Body> body_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<int64_t> remaining_{0};
  alignas(64) std::atomic<int64_t> sleepers_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace edgellm
