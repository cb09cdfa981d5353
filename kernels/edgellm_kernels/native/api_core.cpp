#include "api_core.h"

#include "thread_pool.h"

using namespace edgellm;

int edgellm_has_avx2(int32_t* answer) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  *answer = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  *answer = 0;
#endif
  return kOk;
}

int edgellm_has_avx512vnni(int32_t* answer) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  *answer = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
            __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vnni");
#else
  *answer = 0;
#endif
  return kOk;
}

int edgellm_pool_new(int64_t threads, void** pool) {
  if (threads < 1 || threads > 1024 || pool == nullptr) return kBadArgument;
  return guarded([&] {
    *pool = new Pool(threads);
    return kOk;
  });
}

int edgellm_pool_delete(void* pool) {
  delete static_cast<Pool*>(pool);
  return kOk;
}
