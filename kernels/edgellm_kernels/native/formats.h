// How each packed format is read: its scales as vectors over the eight rows, its codes pair by pair.
//
// A format's weight is scale * (code - kZero) + min, in f32 and in this order, which are the operations and the bits
// of the reference decoders; formats without a minimum leave the addition out. `min` of the k-quants is negated. Grids
// have a zero point per unit: decoded they are scale * (code - zero), in products zero * scale is their minimum.
#pragma once

#include "packed.h"
#include "simd.h"

namespace edgellm {

using simd::F32;
using simd::I16;
using simd::I32;

// Bytes of the codes of 32 weights of 8 rows.
template <int BITS> constexpr int64_t kCodeBytes = BITS * 32;

inline I32 shift_to(I32 v, int from, int to) {
  return from >= to ? simd::shift_right(v, from - to) : simd::shift_left(v, to - from);
}

// The codes of the weights 2p and 2p + 1 of every row.
template <int BITS> inline __attribute__((always_inline)) I16 codes_at(const uint8_t* q, int p) {
  using namespace simd;
  if constexpr (BITS == 8) {
    return widen_i8(reinterpret_cast<const int8_t*>(q) + 16 * p);
  } else if constexpr (BITS >= 4) {
    I32 codes = shift_right(load_i32(q + 32 * (p / 4)), 4 * (p % 4)) & splat_i32(0x000f000f);
    if constexpr (BITS == 5) codes = codes | (shift_to(load_i32(q + 128), p, 4) & splat_i32(0x00100010));
    if constexpr (BITS == 6)
      codes = codes | (shift_to(load_i32(q + 128 + 32 * (p / 8)), 2 * (p % 8), 4) & splat_i32(0x00300030));
    return as_i16(codes);
  } else {
    I32 codes = shift_right(load_i32(q + 32 * (p / 8)), 2 * (p % 8)) & splat_i32(0x00030003);
    if constexpr (BITS == 3) codes = codes | (shift_to(load_i32(q + 64), p, 2) & splat_i32(0x00040004));
    return as_i16(codes);
  }
}

// body(p, codes_at(p)) for p = FIRST .. FIRST + COUNT - 1.
template <int BITS, int FIRST, int COUNT, class F> inline __attribute__((always_inline)) void for_pairs(const uint8_t* q, F&& body) {
#pragma GCC unroll 16
  for (int p = FIRST; p < FIRST + COUNT; ++p) body(p, codes_at<BITS>(q, p));
}

inline const uint16_t* halves(const uint8_t* p) { return reinterpret_cast<const uint16_t*>(p); }

// 32 weights with one scale, and one minimum where MIN.
template <int BITS, int ZERO, bool MIN> struct SimpleFormat {
  static constexpr int kUnit = 32, kSpan = 32, kBits = BITS, kZero = ZERO;
  static constexpr bool kMin = MIN;
  static constexpr int64_t kHeader = MIN ? 32 : 16;
  static void scales(const uint8_t* unit, F32* scale, F32* min) {
    scale[0] = simd::load_f16(halves(unit));
    if constexpr (MIN) min[0] = simd::load_f16(halves(unit + 16));
  }
};

// Sixteen 6-bit fields per row in three words: 0..14 five to a word, 15 from the words' two highest bits.
template <class F> inline void for_six_bit_fields(const uint8_t* words, F&& body) {
  using namespace simd;
  I32 word[3] = {load_i32(words), load_i32(words + 32), load_i32(words + 64)};
#pragma GCC unroll 15
  for (int f = 0; f < 15; ++f) body(f, shift_right(word[f / 5], 6 * (f % 5)) & splat_i32(63));
  body(15, shift_right(word[0], 30) | shift_left(shift_right(word[1], 30), 2) | shift_left(shift_right(word[2], 30), 4));
}

// Q4_K and Q5_K: eight spans of 32; header: d, dmin, fields (8 scales, 8 minima).
template <int BITS> struct KMinFormat {
  static constexpr int kUnit = 256, kSpan = 32, kBits = BITS, kZero = 0;
  static constexpr bool kMin = true;
  static constexpr int64_t kHeader = 128;
  static void scales(const uint8_t* unit, F32* scale, F32* min) {
    using namespace simd;
    F32 d = load_f16(halves(unit)), dmin = zero() - load_f16(halves(unit + 16));
    for_six_bit_fields(unit + 32, [&](int f, I32 field) {
      if (f < 8) scale[f] = d * to_f32(field);
      else min[f - 8] = dmin * to_f32(field);
    });
  }
};

// Sixteen spans of 16; header: d, sixteen times the rows' int8 scales.
struct Q6KFormat {
  static constexpr int kUnit = 256, kSpan = 16, kBits = 6, kZero = 32;
  static constexpr bool kMin = false;
  static constexpr int64_t kHeader = 144;
  static void scales(const uint8_t* unit, F32* scale, F32*) {
    F32 d = simd::load_f16(halves(unit));
    for (int s = 0; s < 16; ++s)
      scale[s] = d * simd::to_f32(simd::load_i8(reinterpret_cast<const int8_t*>(unit) + 16 + 8 * s));
  }
};

// Sixteen spans of 16; header: d, fields (16 scales, 32 too large).
struct Q3KFormat {
  static constexpr int kUnit = 256, kSpan = 16, kBits = 3, kZero = 4;
  static constexpr bool kMin = false;
  static constexpr int64_t kHeader = 112;
  static void scales(const uint8_t* unit, F32* scale, F32*) {
    using namespace simd;
    F32 d = load_f16(halves(unit));
    for_six_bit_fields(unit + 16, [&](int f, I32 field) { scale[f] = d * to_f32(field - splat_i32(32)); });
  }
};

// Sixteen spans of 16; header: d, dmin, sixteen times the rows' bytes scale | min << 4.
struct Q2KFormat {
  static constexpr int kUnit = 256, kSpan = 16, kBits = 2, kZero = 0;
  static constexpr bool kMin = true;
  static constexpr int64_t kHeader = 160;
  static void scales(const uint8_t* unit, F32* scale, F32* min) {
    using namespace simd;
    F32 d = load_f16(halves(unit)), dmin = zero() - load_f16(halves(unit + 16));
    for (int s = 0; s < 16; ++s) {
      I32 both = load_i8(reinterpret_cast<const int8_t*>(unit) + 32 + 8 * s);
      scale[s] = d * to_f32(both & splat_i32(15));
      min[s] = dmin * to_f32(shift_right(both, 4) & splat_i32(15));
    }
  }
};

// UNIT weights of an integer grid with one scale and one zero point, w = scale * (code - zero); header: scales, zeros.
// Codes of bytes are stored 128 too small, and so the zeros count.
template <int BITS, int UNIT> struct GridFormat {
  static constexpr int kUnit = UNIT, kSpan = 32, kBits = BITS, kZero = 0;
  static constexpr bool kMin = true;
  static constexpr int64_t kHeader = 24;
  static F32 zeros(const uint8_t* unit) {
    using namespace simd;
    const I32 bytes = load_i8(reinterpret_cast<const int8_t*>(unit) + 16) & splat_i32(255);
    return to_f32(BITS == 8 ? bytes - splat_i32(128) : bytes);
  }
  static void scales(const uint8_t* unit, F32* scale, F32* min) {
    using namespace simd;
    const F32 own = load_f16(halves(unit)), offset = zero() - own * zeros(unit);
    for (int s = 0; s < UNIT / 32; ++s) {
      scale[s] = own;
      min[s] = offset;
    }
  }
};
template <class T> constexpr bool kIsGrid = false;
template <int BITS, int UNIT> constexpr bool kIsGrid<GridFormat<BITS, UNIT>> = true;

template <class T> constexpr int64_t kUnitBytes = T::kHeader + T::kUnit / 32 * kCodeBytes<T::kBits>;

// visit(format type{}) for a block format; false for the dense ones.
template <class F> inline bool visit_format(Format format, F&& visit) {
  switch (format) {
    case Format::kQ4_0: visit(SimpleFormat<4, 8, false>{}); return true;
    case Format::kQ4_1: visit(SimpleFormat<4, 0, true>{}); return true;
    case Format::kQ5_0: visit(SimpleFormat<5, 16, false>{}); return true;
    case Format::kQ5_1: visit(SimpleFormat<5, 0, true>{}); return true;
    case Format::kQ8_0: visit(SimpleFormat<8, 0, false>{}); return true;
    case Format::kQ2_K: visit(Q2KFormat{}); return true;
    case Format::kQ3_K: visit(Q3KFormat{}); return true;
    case Format::kQ4_K: visit(KMinFormat<4>{}); return true;
    case Format::kQ5_K: visit(KMinFormat<5>{}); return true;
    case Format::kQ6_K: visit(Q6KFormat{}); return true;
    case Format::kGrid4x32: visit(GridFormat<4, 32>{}); return true;
    case Format::kGrid4x64: visit(GridFormat<4, 64>{}); return true;
    case Format::kGrid4x128: visit(GridFormat<4, 128>{}); return true;
    case Format::kGrid8x32: visit(GridFormat<8, 32>{}); return true;
    case Format::kGrid8x128: visit(GridFormat<8, 128>{}); return true;
    default: return false;
  }
}

}  // namespace edgellm
