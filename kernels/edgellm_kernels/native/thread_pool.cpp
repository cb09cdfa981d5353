#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <system_error>

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace edgellm {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSpinTime = std::chrono::milliseconds(2);
// Who has waited longer than this gives the core away between looks, if somebody wants it.
constexpr auto kSelfishTime = std::chrono::microseconds(100);

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

thread_local bool inside_task = false;

}  // namespace

// All pools of the process, for the sake of forked children. Never destroyed.
struct LivePools {
  std::mutex mutex;
  std::vector<Pool*> pools;

  static LivePools& all() {
    static LivePools* const live = [] {
      pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); }, in_child);
      return new LivePools;
    }();
    return *live;
  }

  static void in_child() {
    LivePools& live = all();
    inside_task = false;
    for (Pool* pool : live.pools) {
      // Threads and locks of the parent are left where they are: they cannot be joined or destroyed here.
      (void)pool->workers_.release();
      (void)pool->locks_.release();
      pool->workers_ = std::make_unique<std::vector<std::thread>>();
      pool->locks_ = std::make_unique<Pool::Locks>();
      pool->sleepers_.store(0);
      pool->number_.store((pool->number_.load() + 3) & ~uint64_t{1});  // no job is current
      pool->started_ = false;
    }
    live.mutex.unlock();
  }
};

Pool::Pool(int64_t threads)
    : num_threads_(std::clamp<int64_t>(threads, 1, kMaxThreads)),
      shares_(new Share[static_cast<size_t>(num_threads_)]),
      workers_(std::make_unique<std::vector<std::thread>>()),
      locks_(std::make_unique<Locks>()) {
  LivePools& live = LivePools::all();
  std::lock_guard<std::mutex> lock(live.mutex);
  live.pools.push_back(this);
}

Pool::~Pool() {
  {
    LivePools& live = LivePools::all();
    std::lock_guard<std::mutex> lock(live.mutex);
    live.pools.erase(std::remove(live.pools.begin(), live.pools.end(), this), live.pools.end());
  }
  {
    std::lock_guard<std::mutex> lock(locks_->sleep);
    stop_.store(true);
    locks_->wake.notify_all();
  }
  for (std::thread& worker : *workers_) worker.join();
}

void Pool::start_workers() {
  // Signals are for the threads that the program knows.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (int64_t thread = 1; thread < num_threads_; ++thread) {
      workers_->emplace_back([this, thread] { work(thread); });
    }
  } catch (const std::system_error&) {
    // The system gives no more threads: the share of one that is missing is taken by the others.
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  started_ = true;
}

void Pool::run(int64_t tasks, Body body, void* context) {
  if (tasks <= 0) return;
  if (inside_task || tasks == 1 || num_threads_ == 1) {
    for (int64_t task = 0; task < tasks; ++task) body(context, task, 0);
    return;
  }
  std::lock_guard<std::mutex> lock(locks_->call);
  if (!started_) start_workers();
  const uint64_t number = number_.load(std::memory_order_relaxed) + 2;
  number_.store(number - 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  tasks_.store(tasks, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  remaining_.store(tasks, std::memory_order_relaxed);
  for (int64_t thread = 0; thread < num_threads_; ++thread) {
    const uint64_t first = static_cast<uint64_t>(tasks * thread / num_threads_);
    shares_[thread].next.store(number << 32 | first, std::memory_order_relaxed);
  }
  number_.store(number, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> sleep_lock(locks_->sleep);
    locks_->wake.notify_all();
  }
  help(number, 0);
  for (int64_t spins = 1; remaining_.load(std::memory_order_acquire) > 0; ++spins) {
    cpu_pause();
    if (spins % 4096 == 0) sched_yield();
  }
}

void Pool::help(uint64_t number, int64_t thread) {
  const int64_t tasks = tasks_.load(std::memory_order_relaxed);
  const Body body = body_.load(std::memory_order_relaxed);
  void* const context = context_.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (number_.load(std::memory_order_relaxed) != number) return;  // late: that job is done
  int64_t done = 0;
  inside_task = true;
  for (int64_t turn = 0; turn < num_threads_; ++turn) {
    const int64_t owner = (thread + turn) % num_threads_;
    const uint64_t end = static_cast<uint64_t>(tasks * (owner + 1) / num_threads_);
    std::atomic<uint64_t>& next = shares_[owner].next;
    uint64_t seen = next.load(std::memory_order_relaxed);
    while ((seen >> 32) == (number & 0xffffffff) && (seen & 0xffffffff) < end) {
      if (!next.compare_exchange_weak(seen, seen + 1, std::memory_order_relaxed)) continue;
      body(context, static_cast<int64_t>(seen & 0xffffffff), thread);
      ++done;
      seen = next.load(std::memory_order_relaxed);
    }
  }
  inside_task = false;
  if (done > 0) remaining_.fetch_sub(done, std::memory_order_release);
}

bool Pool::wait_for_job(uint64_t seen) {
  const auto is_new = [&](std::memory_order order) {
    const uint64_t number = number_.load(order);
    return number != seen && number % 2 == 0;
  };
  const auto begin = Clock::now();
  while (true) {
    for (int spins = 0; spins < 64; ++spins) {
      if (is_new(std::memory_order_acquire)) return true;
      cpu_pause();
    }
    if (stop_.load(std::memory_order_relaxed)) return false;
    const auto waited = Clock::now() - begin;
    if (waited > kSpinTime) break;
    if (waited > kSelfishTime) sched_yield();
  }
  std::unique_lock<std::mutex> lock(locks_->sleep);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  // A caller either sees this sleeper and notifies it, or has published before and is seen here.
  locks_->wake.wait(lock, [&] { return stop_.load() || is_new(std::memory_order_seq_cst); });
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return !stop_.load();
}

void Pool::work(int64_t thread) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "edgellm-worker");
#endif
  uint64_t seen = 0;
  while (wait_for_job(seen)) {
    const uint64_t number = number_.load(std::memory_order_acquire);
    if (number % 2 != 0) continue;
    seen = number;
    help(number, thread);
  }
}

}  // namespace edgellm
