// What every api_*.cpp shares: status codes, visibility, and the wrapper that lets no exception reach the caller.
//
// The headers api_*.h declare the library's functions, one prototype per function, and native_library.py reads the
// argument types from them. Rules: extern "C", every function returns int (a Status), arguments are pointers,
// int64_t, int32_t, float or double. The caller owns all memory and checks shapes; a function checks again what
// would otherwise read or write outside of it. `pool` is what edgellm_pool_new gave.
#pragma once

#include <cstdint>
#include <new>

#define EDGELLM_API extern "C" __attribute__((visibility("default")))

namespace edgellm {

enum Status : int { kOk = 0, kBadArgument = 1, kNoMemory = 2, kFailed = 3 };

// Runs body() -> Status.
template <class F> int guarded(F&& body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (...) {
    return kFailed;
  }
}

}  // namespace edgellm
