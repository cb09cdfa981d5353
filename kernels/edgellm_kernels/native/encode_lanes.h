// What the encoders add to simd.h: choosing between lanes, and eight blocks of memory turned into lanes.
#pragma once

#include "simd.h"

namespace edgellm::simd {

#ifdef EDGELLM_AVX2

struct Mask { __m256 v; };
inline Mask greater(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ)}; }
inline Mask greater_equal(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)}; }
inline Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.v, b.v)}; }
inline F32 select(Mask m, F32 yes, F32 no) { return {_mm256_blendv_ps(no.v, yes.v, m.v)}; }

// Eight rows of eight floats, `stride` apart -> out[j] holds element j of every row.
inline void transpose(const float* const rows[8], F32* out) {
  __m256 r[8], a[8], b[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(rows[i]);
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = {_mm256_permute2f128_ps(b[i], b[i + 4], 0x20)};
    out[i + 4] = {_mm256_permute2f128_ps(b[i], b[i + 4], 0x31)};
  }
}

#else

struct Mask { VI v; };
inline Mask greater(F32 a, F32 b) { return {a.v > b.v}; }
inline Mask greater_equal(F32 a, F32 b) { return {a.v >= b.v}; }
inline Mask operator&(Mask a, Mask b) { return {a.v & b.v}; }
inline F32 select(Mask m, F32 yes, F32 no) { return {m.v ? yes.v : no.v}; }

inline void transpose(const float* const rows[8], F32* out) {
  for (int j = 0; j < 8; ++j)
    for (int i = 0; i < 8; ++i) out[j].v[i] = rows[i][j];
}

#endif

}  // namespace edgellm::simd
