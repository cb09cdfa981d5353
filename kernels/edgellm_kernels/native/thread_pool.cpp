#include "thread_pool.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace edgellm {

struct Pool::State {
  std::mutex mutex;
  std::condition_variable wake, done;
  std::vector<std::thread> workers;
  void (*body)(void*, int64_t) = nullptr;
  void* context = nullptr;
  int64_t tasks = 0, round = 0, running = 0;
  bool stop = false;
};

Pool::Pool(int64_t threads) : state_(new State), threads_(threads < 1 ? 1 : threads) {
  for (int64_t t = 1; t < threads_; ++t) {
    state_->workers.emplace_back([this, t] {
      State& s = *state_;
      int64_t seen = 0;
      std::unique_lock<std::mutex> lock(s.mutex);
      while (true) {
        s.wake.wait(lock, [&] { return s.stop || s.round != seen; });
        if (s.stop) return;
        seen = s.round;
        lock.unlock();
        for (int64_t i = s.tasks * t / threads_; i < s.tasks * (t + 1) / threads_; ++i) s.body(s.context, i);
        lock.lock();
        if (--s.running == 0) s.done.notify_one();
      }
    });
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
  for (std::thread& worker : state_->workers) worker.join();
  delete state_;
}

void Pool::run(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  State& s = *state_;
  if (threads_ > 1 && tasks > 1) {
    {
      std::lock_guard<std::mutex> lock(s.mutex);
      s.body = body;
      s.context = context;
      s.tasks = tasks;
      s.running = threads_ - 1;
      ++s.round;
    }
    s.wake.notify_all();
    for (int64_t i = 0; i < tasks / threads_; ++i) body(context, i);
    std::unique_lock<std::mutex> lock(s.mutex);
    s.done.wait(lock, [&] { return s.running == 0; });
    return;
  }
  for (int64_t i = 0; i < tasks; ++i) body(context, i);
}

}  // namespace edgellm
