// The vector primitives that every kernel is written in: eight 32-bit lanes, two back ends.
//
// EDGELLM_AVX2 chooses intrinsics, EDGELLM_VNNI besides it one that multiplies and adds integers at once, over twice as
// many registers: the bits are those of AVX2. Without either the same operations are written with the compiler's vector types,
// which it maps to whatever the target has. Each back end gives the same bits on every run and call path. They may
// differ from each other in the last bit of fma(), which the portable one rounds twice where the target has no
// fused multiply-add (a call into the mathematics library per lane would be far slower than torch).
#pragma once

#include <cstdint>
#include <cstring>

#ifdef EDGELLM_AVX2
#include <immintrin.h>
#endif

namespace edgellm::simd {

constexpr int kLanes = 8;

#ifdef EDGELLM_VNNI
constexpr bool kManyRegisters = true;  // 32 in place of 16
#else
constexpr bool kManyRegisters = false;
#endif

#ifdef EDGELLM_AVX2

struct F32 { __m256 v; };
struct I32 { __m256i v; };
struct I16 { __m256i v; };  // 16 lanes

inline F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }
inline F32 splat(float a) { return {_mm256_set1_ps(a)}; }
inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }
// Nearest integer, ties to even.
inline I32 round_i32(F32 a) { return {_mm256_cvtps_epi32(a.v)}; }
inline F32 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void store_f16(uint16_t* p, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline float f16_one(uint16_t a) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(a))); }
inline F32 load_bf16(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}

inline I32 load_i32(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
inline void store_i32(void* p, I32 a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.v); }
inline I32 splat_i32(int32_t a) { return {_mm256_set1_epi32(a)}; }
inline I32 operator+(I32 a, I32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline I32 operator&(I32 a, I32 b) { return {_mm256_and_si256(a.v, b.v)}; }
inline I32 operator|(I32 a, I32 b) { return {_mm256_or_si256(a.v, b.v)}; }
inline I32 mul_i32(I32 a, I32 b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline I32 shift_left(I32 a, int n) { return {_mm256_slli_epi32(a.v, n)}; }
inline I32 shift_right(I32 a, int n) { return {_mm256_srli_epi32(a.v, n)}; }         // logical
inline I32 shift_right_signed(I32 a, int n) { return {_mm256_srai_epi32(a.v, n)}; }  // arithmetic
inline I32 load_i8(const int8_t* p) {  // eight bytes, sign extended
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}

// The same 32 bits read as the other type.
inline F32 from_bits(I32 a) { return {_mm256_castsi256_ps(a.v)}; }
inline I32 bits_of(F32 a) { return {_mm256_castps_si256(a.v)}; }
// Lane by lane: a < b ? x : y.
inline F32 select_less(F32 a, F32 b, F32 x, F32 y) {
  return {_mm256_blendv_ps(y.v, x.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
// p[0..3] = the sums of the lanes of a, b, c and d: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
inline void store_sums(float* p, F32 a, F32 b, F32 c, F32 d) {
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
  _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

inline I16 as_i16(I32 a) { return {a.v}; }
inline I32 as_i32(I16 a) { return {a.v}; }
inline I16 load_i16(const int16_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline void store_i16(int16_t* p, I16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v); }
inline I16 widen_i8(const int8_t* p) {  // sixteen bytes, sign extended
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// p[0..15] = a then b, whose lanes are within int16.
inline void store_narrow(int16_t* p, I32 a, I32 b) {
  const __m256i pairs = _mm256_packs_epi32(a.v, b.v);  // of each half of a, then of b
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(pairs, 0xd8));
}
// The largest of eight finite lanes, and the sum of eight integers.
inline float largest_lane(F32 a) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline int32_t sum_of_lanes(I32 a) {
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
// The same two int16 for every lane.
inline I16 splat_pair(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return {_mm256_set1_epi32(both)};
}
// acc + a[2i] * b[2i] + a[2i + 1] * b[2i + 1], exact in int32.
inline I32 dot_pairs(I32 acc, I16 a, I16 b) {
#ifdef EDGELLM_VNNI
  return {_mm256_dpwssd_epi32(acc.v, a.v, b.v)};
#else
  return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(a.v, b.v))};
#endif
}

// Computes the value here: without it the compiler moves all loads of a loop body to its head and spills sums.
#ifdef EDGELLM_VNNI
inline void pin(I32& a) { asm volatile("" : "+v"(a.v)); }  // any of 32 registers
inline void pin(F32& a) { asm volatile("" : "+v"(a.v)); }
#else
inline void pin(I32& a) { asm volatile("" : "+x"(a.v)); }
inline void pin(F32& a) { asm volatile("" : "+x"(a.v)); }
#endif

#else  // portable

typedef float VF __attribute__((vector_size(32)));
typedef int32_t VI __attribute__((vector_size(32)));
typedef uint32_t VU __attribute__((vector_size(32)));
typedef int16_t VS __attribute__((vector_size(32)));
typedef uint16_t VH __attribute__((vector_size(16)));
typedef int8_t VB8 __attribute__((vector_size(8)));
typedef int8_t VB16 __attribute__((vector_size(16)));

struct F32 { VF v; };
struct I32 { VI v; };
struct I16 { VS v; };

template <class T> inline T load_as(const void* p) {
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <class T> inline T bits_as(VI a) { return reinterpret_cast<T>(a); }

inline F32 load(const float* p) { return {load_as<VF>(p)}; }
inline void store(float* p, F32 a) { std::memcpy(p, &a.v, 32); }
inline F32 splat(float a) { return {VF{a, a, a, a, a, a, a, a}}; }
inline F32 operator+(F32 a, F32 b) { return {a.v + b.v}; }
inline F32 operator-(F32 a, F32 b) { return {a.v - b.v}; }
inline F32 operator*(F32 a, F32 b) { return {a.v * b.v}; }
inline F32 operator/(F32 a, F32 b) { return {a.v / b.v}; }
inline F32 fma(F32 a, F32 b, F32 c) {
#ifdef __FP_FAST_FMAF
  F32 r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return r;
#else
  return {a.v * b.v + c.v};
#endif
}
// As the AVX2 instructions: the second operand where one is not a number.
inline F32 min(F32 a, F32 b) { return {a.v < b.v ? a.v : b.v}; }
inline F32 max(F32 a, F32 b) { return {a.v > b.v ? a.v : b.v}; }
inline F32 abs(F32 a) { return {reinterpret_cast<VF>(reinterpret_cast<VI>(a.v) & 0x7fffffff)}; }
inline F32 to_f32(I32 a) { return {__builtin_convertvector(a.v, VF)}; }
// Nearest integer, ties to even: adding 1.5 * 2^23 leaves it in the low bits. Only for |a| < 2^22.
inline I32 round_i32(F32 a) {
  VF shifted = a.v + 12582912.0f;
  return {reinterpret_cast<VI>(shifted) - 0x4b400000};
}
inline F32 load_f16(const uint16_t* p) {
  // The exponent's bias is changed by a multiplication, which makes subnormals right too; infinities and NaN apart.
  VU h = __builtin_convertvector(load_as<VH>(p), VU);
  VU sign = (h & 0x8000u) << 16;
  VU rest = (h & 0x7fffu) << 13;
  VF scaled = reinterpret_cast<VF>(rest) * 5.192296858534828e33f;  // 2^112
  VU special = reinterpret_cast<VU>(rest >= 0x0f800000u);
  VU bits = (reinterpret_cast<VU>(scaled) & ~special) | ((rest | 0x7f800000u) & special);
  return {reinterpret_cast<VF>(bits | sign)};
}
inline float f16_one(uint16_t a) {
  uint16_t lanes[kLanes] = {a};
  return load_f16(lanes).v[0];
}
inline uint16_t f16_from_f32(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns the units of 2^-24 with the last bit
    float tiny;
    std::memcpy(&tiny, &magnitude, 4);
    tiny += 0.5f;
    std::memcpy(&magnitude, &tiny, 4);
    return static_cast<uint16_t>(sign | (magnitude - 0x3f000000u));
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}
inline void store_f16(uint16_t* p, F32 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = f16_from_f32(a.v[i]);
}
inline F32 load_bf16(const uint16_t* p) {
  return {reinterpret_cast<VF>(__builtin_convertvector(load_as<VH>(p), VU) << 16)};
}

inline I32 load_i32(const void* p) { return {load_as<VI>(p)}; }
inline void store_i32(void* p, I32 a) { std::memcpy(p, &a.v, 32); }
inline I32 splat_i32(int32_t a) { return {VI{a, a, a, a, a, a, a, a}}; }
inline I32 operator+(I32 a, I32 b) { return {a.v + b.v}; }
inline I32 operator-(I32 a, I32 b) { return {a.v - b.v}; }
inline I32 operator&(I32 a, I32 b) { return {a.v & b.v}; }
inline I32 operator|(I32 a, I32 b) { return {a.v | b.v}; }
inline I32 mul_i32(I32 a, I32 b) { return {a.v * b.v}; }
inline I32 shift_left(I32 a, int n) { return {reinterpret_cast<VI>(reinterpret_cast<VU>(a.v) << n)}; }
inline I32 shift_right(I32 a, int n) { return {reinterpret_cast<VI>(reinterpret_cast<VU>(a.v) >> n)}; }
inline I32 shift_right_signed(I32 a, int n) { return {a.v >> n}; }
inline I32 load_i8(const int8_t* p) { return {__builtin_convertvector(load_as<VB8>(p), VI)}; }

inline F32 from_bits(I32 a) { return {reinterpret_cast<VF>(a.v)}; }
inline I32 bits_of(F32 a) { return {reinterpret_cast<VI>(a.v)}; }
inline F32 select_less(F32 a, F32 b, F32 x, F32 y) { return {a.v < b.v ? x.v : y.v}; }
inline void store_sums(float* p, F32 a, F32 b, F32 c, F32 d) {
  const F32 rows[4] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    const VF v = rows[i].v;
    p[i] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
}

inline I16 as_i16(I32 a) { return {reinterpret_cast<VS>(a.v)}; }
inline I32 as_i32(I16 a) { return {reinterpret_cast<VI>(a.v)}; }
inline I16 load_i16(const int16_t* p) { return {load_as<VS>(p)}; }
inline void store_i16(int16_t* p, I16 a) { std::memcpy(p, &a.v, 32); }
inline I16 widen_i8(const int8_t* p) { return {__builtin_convertvector(load_as<VB16>(p), VS)}; }
inline void store_narrow(int16_t* p, I32 a, I32 b) {
  for (int i = 0; i < kLanes; ++i) {
    p[i] = static_cast<int16_t>(a.v[i]);
    p[kLanes + i] = static_cast<int16_t>(b.v[i]);
  }
}
inline float largest_lane(F32 a) {
  float best = a.v[0];
  for (int i = 1; i < kLanes; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}
inline int32_t sum_of_lanes(I32 a) {
  int32_t sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += a.v[i];
  return sum;
}
inline I16 splat_pair(const int16_t* p) {
  int32_t both;
  std::memcpy(&both, p, 4);
  return as_i16(splat_i32(both));
}
inline I32 dot_pairs(I32 acc, I16 a, I16 b) {
#ifdef __SSE2__
  // The compiler does not find pmaddwd by itself; every x86-64 has it.
  typedef short V8 __attribute__((vector_size(16)));
  typedef int V4 __attribute__((vector_size(16)));
  V8 a2[2], b2[2];
  std::memcpy(a2, &a.v, 32);
  std::memcpy(b2, &b.v, 32);
  V4 sums[2] = {__builtin_ia32_pmaddwd128(a2[0], b2[0]), __builtin_ia32_pmaddwd128(a2[1], b2[1])};
  return {acc.v + load_as<VI>(sums)};
#else
  VI x = as_i32(a).v, y = as_i32(b).v;
  return {acc.v + ((x << 16) >> 16) * ((y << 16) >> 16) + (x >> 16) * (y >> 16)};
#endif
}

inline void pin(I32&) {}
inline void pin(F32&) {}

#endif

inline F32 zero() { return splat(0.0f); }

// The sum and the largest of eight lanes, always in the same order.
inline float sum_lanes(F32 a) {
  float t[kLanes];
  store(t, a);
  return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]));
}
inline float max_lanes(F32 a) {
  float t[kLanes];
  store(t, a);
  float best = t[0];
  for (int i = 1; i < kLanes; ++i) best = t[i] > best ? t[i] : best;
  return best;
}

// One multiply-add of the same rounding as fma() above, for the elements behind the last whole vector.
inline float fma_one(float a, float b, float c) {
#if defined(EDGELLM_AVX2) || defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

}  // namespace edgellm::simd
