// The library itself: the processor it may run on, and the thread pool.
#pragma once
#include "api.h"

// *answer = 1 if this processor and operating system run the avx2 library (AVX2, FMA and F16C), else 0.
EDGELLM_API int edgellm_has_avx2(int32_t* answer);
// The same of the avx512vnni library (AVX-512 F, VL, BW, DQ and VNNI besides).
EDGELLM_API int edgellm_has_avx512vnni(int32_t* answer);
// A pool of `threads` threads, the caller's included, into *pool; edgellm_pool_delete ends it.
EDGELLM_API int edgellm_pool_new(int64_t threads, void** pool);
EDGELLM_API int edgellm_pool_delete(void* pool);
