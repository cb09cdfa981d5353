// The threads that share a kernel's work.
#pragma once

#include <cstdint>
#include <type_traits>

namespace edgellm {

// A persistent pool. Tasks are dealt out statically, and no kernel lets a result depend on which thread computed it.
class Pool {
 public:
  // The caller is one of the `threads`.
  explicit Pool(int64_t threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int64_t threads() const { return threads_; }

  // body(task) for every task of 0 .. tasks - 1; returns when all are done. Thread t runs one contiguous share.
  template <class F> void parallel_for(int64_t tasks, F&& body) {
    using Body = std::remove_reference_t<F>;
    run(tasks, [](void* context, int64_t task) { (*static_cast<Body*>(context))(task); }, &body);
  }

 private:
  void run(int64_t tasks, void (*body)(void*, int64_t), void* context);

  struct State;
  State* state_;
  int64_t threads_;
};

}  // namespace edgellm
