// exp, tanh and the activations on eight lanes. A lane's result depends on its own input alone.
#pragma once

#include "simd.h"

namespace edgellm {

// e^x, off by at most 2 units in the last place above -87.3, where results are normal; at most 2^-149 below. Exactly
// 0 from -104 down (so for -infinity), infinity above 88.8; NaN stays NaN. Reduction by multiples of ln 2 and the
// minimax polynomial of Cephes' expf.
inline simd::F32 exp(simd::F32 x) {
  using namespace simd;
  x = min(splat(89.0f), max(splat(-104.0f), x));  // in this order both keep NaN
  const I32 n = round_i32(x * splat(1.44269504088896341f));
  const F32 nf = to_f32(n);
  F32 r = fma(nf, splat(-0.693359375f), x);
  r = fma(nf, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  const F32 y = fma(p, r * r, r) + splat(1.0f);
  // 2^n in two factors: n reaches -150 and 128.
  const I32 half = shift_right_signed(n, 1);
  const F32 first = from_bits(shift_left(half + splat_i32(127), 23));
  const F32 second = from_bits(shift_left(n - half + splat_i32(127), 23));
  return y * first * second;
}

// Off by at most 3 units in the last place: Cephes' tanhf.
inline simd::F32 tanh(simd::F32 x) {
  using namespace simd;
  const F32 size = abs(x), z = x * x;
  F32 p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  const F32 small = fma(p, z * x, x);
  const F32 large = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
  const I32 sign = bits_of(x) & splat_i32(INT32_MIN);
  return select_less(size, splat(0.625f), small, from_bits(bits_of(large) | sign));
}

inline simd::F32 soft_cap(simd::F32 x, float cap) {
  return tanh(x / simd::splat(cap)) * simd::splat(cap);
}

// x / (1 + e^-x)
inline simd::F32 silu(simd::F32 x) {
  using namespace simd;
  return x / (splat(1.0f) + exp(zero() - x));
}

// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + e^-2u): nothing cancels.
inline simd::F32 gelu_tanh(simd::F32 x) {
  using namespace simd;
  const F32 u = fma(x * x * x, splat(0.044715f), x);
  return x / (splat(1.0f) + exp(u * splat(-1.5957691216057308f)));
}

}  // namespace edgellm
