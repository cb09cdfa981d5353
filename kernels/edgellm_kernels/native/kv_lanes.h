// Stored K and V as f32 lanes, by the type of the pages.
#pragma once

#include "kv_pages.h"
#include "simd.h"

namespace edgellm {

// Eight elements from `at` on; scale: of int8 rows.
template <int64_t kType> inline simd::F32 load_lanes(const void* data, int64_t at, simd::F32 scale) {
  using namespace simd;
  if constexpr (kType == kKVF32) return load(static_cast<const float*>(data) + at);
  if constexpr (kType == kKVF16) return load_f16(static_cast<const uint16_t*>(data) + at);
  if constexpr (kType == kKVBF16) return load_bf16(static_cast<const uint16_t*>(data) + at);
  return to_f32(load_i8(static_cast<const int8_t*>(data) + at)) * scale;
}

constexpr int64_t element_bytes(int64_t type) { return type == kKVF32 ? 4 : type == kKVInt8 ? 1 : 2; }

}  // namespace edgellm
