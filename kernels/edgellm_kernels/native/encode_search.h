// The search for the scales of eight blocks at once, one in each lane: block_search.py says what is computed, and
// this gives the same bits. No lane ever sees another one, sums run from the first weight to the last, and nothing
// is contracted into multiply-adds: so neither vector width nor threads change a result.
#pragma once

#include <cstdint>

#include "encode_lanes.h"

// The portable build splits every vector: inlined everywhere, that takes the compiler minutes.
#ifdef EDGELLM_AVX2
#define EDGELLM_ENCODE_OUTLINE
#else
#define EDGELLM_ENCODE_OUTLINE __attribute__((noinline))
#endif

namespace edgellm::encode {

using namespace simd;

struct Plan {
  const float* steps;
  const float* mirrored;
  const float* d_factors;
  const float* dmin_factors;
  int num_steps, num_mirrored, descents, num_d, num_dmin, radius, polishes;
};

constexpr float kMagic = 12582912.0f;
constexpr float kTiny = 1e-30f;

inline F32 nearest(F32 a, F32 low, F32 high) {
  return (max(min(a, high), low) + splat(kMagic)) - splat(kMagic);
}
inline F32 inverse(F32 a) {
  return select(greater(abs(a), splat(kTiny)), splat(1.0f) / a, zero());
}
inline F32 half(F32 a) {
  uint16_t bits[kLanes];
  store_f16(bits, max(min(a, splat(65504.0f)), splat(-65504.0f)));
  return load_f16(bits) + zero();  // no negative zero
}
inline F32 negative(F32 a) { return a * splat(-1.0f); }

// A block type: kSub sub-blocks of kLen weights; codes from kLow to kHigh, counted from the code of zero; with
// offsets or symmetric; kGreatest is the largest integer scale, 0 where there is only an f16.
template <int kSubBlocks, int kLength, bool kWithOffset, int kLowCode, int kHighCode, int kLeastScale,
          int kGreatestScale>
struct Grid {
  static constexpr int kSub = kSubBlocks, kLen = kLength, kElements = kSub * kLen;
  static constexpr bool kOffset = kWithOffset, kTwo = kGreatestScale > 0;
  static constexpr int kLow = kLowCode, kHigh = kHighCode, kLeast = kLeastScale, kGreatest = kGreatestScale;
};

// The best so far of every block.
template <class G> struct Choice {
  F32 error, d, dmin;
  F32 scales[G::kSub], minima[G::kSub];

  void keep(Mask better, const Choice& other) {
    error = select(better, other.error, error);
    d = select(better, other.d, d);
    dmin = select(better, other.dmin, dmin);
    for (int s = 0; s < G::kSub; ++s) {
      scales[s] = select(better, other.scales[s], scales[s]);
      minima[s] = select(better, other.minima[s], minima[s]);
    }
  }
  F32 sub_scale(int s) const { return G::kTwo ? d * scales[s] : d; }
  F32 sub_offset(int s) const { return G::kTwo ? negative(dmin * minima[s]) : dmin; }
};

template <class G, bool kWeighted> class Search {
 public:
  // x, w [kElements]: element e of the eight blocks; w is not read where it is not weighted.
  Search(const F32* x, const F32* w, const Plan& plan) : x_(x), w_(w), plan_(plan) {}

  Choice<G> run() {
    F32 scale[G::kSub], offset[G::kSub];
    for (int s = 0; s < G::kSub; ++s) {
      if constexpr (G::kOffset) {
        fit_affine(s, scale[s], offset[s]);
      } else {
        fit_symmetric(s, scale[s]);
        offset[s] = zero();
      }
    }
    if constexpr (G::kTwo) return two_levels(scale, offset);
    return one_level(scale[0], offset[0]);
  }

  // The code of element e of sub-block s for its decoded scale (by its inverse) and offset.
  F32 code(int s, int e, F32 inverse_scale, F32 offset) const {
    F32 value = x_[s * G::kLen + e];
    if constexpr (G::kOffset) value = value - offset;
    return nearest(value * inverse_scale, low(), high());
  }

 private:
  static F32 low() { return splat(static_cast<float>(G::kLow)); }
  static F32 high() { return splat(static_cast<float>(G::kHigh)); }

  F32 weighted(int i, F32 a) const {
    if constexpr (kWeighted) return w_[i] * a;
    return a;
  }

  EDGELLM_ENCODE_OUTLINE void fit_affine(int s, F32& scale_out, F32& offset_out) const {
    const F32* x = x_ + s * G::kLen;
    const int at = s * G::kLen;
    F32 least = x[0], most = x[0];
    for (int e = 1; e < G::kLen; ++e) {
      least = min(least, x[e]);
      most = max(most, x[e]);
    }
    if constexpr (G::kTwo) least = min(least, zero());
    const F32 span = most - least;
    F32 y[G::kLen], wy[G::kLen];
    F32 sum_w = weighted(at, splat(1.0f)), sum_y;
    for (int e = 0; e < G::kLen; ++e) {
      y[e] = x[e] - least;
      wy[e] = weighted(at + e, y[e]);
      sum_y = e ? sum_y + wy[e] : wy[e];
      if (e) sum_w = sum_w + weighted(at + e, splat(1.0f));
    }
    F32 best_scale = span / high(), best_offset = zero();
    F32 best_gain = splat(-__builtin_inff());

    auto consider = [&](F32 inverse_scale, F32 offset) EDGELLM_ENCODE_OUTLINE {
      F32 sum_q = zero(), sum_qq = zero(), sum_yq = zero();
      for (int e = 0; e < G::kLen; ++e) {
        F32 q = nearest((y[e] - offset) * inverse_scale, zero(), high());
        F32 wq = weighted(at + e, q);
        sum_q = sum_q + wq;
        sum_qq = sum_qq + wq * q;
        sum_yq = sum_yq + wy[e] * q;
      }
      F32 det = sum_w * sum_qq - sum_q * sum_q;
      F32 inverse_det = inverse(det);
      F32 scale = (sum_w * sum_yq - sum_y * sum_q) * inverse_det;
      F32 shift = (sum_qq * sum_y - sum_q * sum_yq) * inverse_det;
      if constexpr (G::kTwo) {
        Mask above = greater(least + shift, zero());
        shift = select(above, negative(least), shift);
        scale = select(above, (sum_yq + least * sum_q) * inverse(sum_qq), scale);
      }
      F32 linear = scale * sum_yq + shift * sum_y;
      F32 square = ((scale * scale) * sum_qq + (shift * shift) * sum_w) + ((scale * shift) * sum_q) * splat(2.0f);
      F32 gain = linear * splat(2.0f) - square;
      Mask better = greater(gain, best_gain) & greater(det, splat(kTiny)) & greater(scale, zero());
      best_gain = select(better, gain, best_gain);
      best_scale = select(better, scale, best_scale);
      best_offset = select(better, shift, best_offset);
    };

    const F32 inverse_span = inverse(span);
    for (int i = 0; i < plan_.num_steps; ++i)
      consider((high() + splat(plan_.steps[i])) * inverse_span, zero());
    for (int i = 0; i < plan_.descents; ++i) consider(inverse(best_scale), best_offset);
    scale_out = best_scale;
    offset_out = best_offset + least;
  }

  EDGELLM_ENCODE_OUTLINE void fit_symmetric(int s, F32& scale_out) const {
    const F32* x = x_ + s * G::kLen;
    const int at = s * G::kLen;
    F32 bottom = x[0], top = x[0];
    for (int e = 1; e < G::kLen; ++e) {
      bottom = min(bottom, x[e]);
      top = max(top, x[e]);
    }
    const F32 extreme = select(greater_equal(top, negative(bottom)), top, bottom);
    const F32 inverse_extreme = inverse(extreme);
    F32 wx[G::kLen];
    for (int e = 0; e < G::kLen; ++e) wx[e] = weighted(at + e, x[e]);
    F32 best_scale = extreme * splat(static_cast<float>(1.0 / G::kLow));
    F32 best_gain = splat(-__builtin_inff());

    auto consider = [&](F32 inverse_scale) EDGELLM_ENCODE_OUTLINE {
      F32 sum_xq = zero(), sum_qq = zero();
      for (int e = 0; e < G::kLen; ++e) {
        F32 q = nearest(x[e] * inverse_scale, low(), high());
        sum_xq = sum_xq + wx[e] * q;
        sum_qq = sum_qq + weighted(at + e, q) * q;
      }
      F32 scale = sum_xq * inverse(sum_qq);
      F32 gain = scale * sum_xq;
      Mask better = greater(gain, best_gain);
      best_gain = select(better, gain, best_gain);
      best_scale = select(better, scale, best_scale);
    };

    for (int i = 0; i < plan_.num_steps; ++i) consider((low() - splat(plan_.steps[i])) * inverse_extreme);
    for (int i = 0; i < plan_.num_mirrored; ++i) consider((high() + splat(plan_.mirrored[i])) * inverse_extreme);
    for (int i = 0; i < plan_.descents; ++i) consider(inverse(best_scale));
    scale_out = best_scale;
  }

  // The error of sub-block s with its nearest codes.
  EDGELLM_ENCODE_OUTLINE F32 error(int s, F32 scale, F32 offset) const {
    const F32 inverse_scale = inverse(scale);
    F32 sum = zero();
    for (int e = 0; e < G::kLen; ++e) {
      const int i = s * G::kLen + e;
      F32 value = scale * code(s, e, inverse_scale, offset);
      if constexpr (G::kOffset) value = value + offset;
      F32 rest = x_[i] - value;
      F32 square = weighted(i, rest) * rest;
      sum = sum + square;
    }
    return sum;
  }

  Choice<G> one_level(F32 scale, F32 offset) const {
    Choice<G> best;
    best.scales[0] = splat(1.0f);
    best.minima[0] = zero();
    best.d = half(scale);
    best.dmin = G::kOffset ? half(offset) : zero();
    best.error = error(0, best.d, best.dmin);
    for (int i = 0; i < plan_.polishes; ++i) {
      Choice<G> other = best;
      least_squares(best, other.d, other.dmin);
      other.d = half(other.d);
      other.dmin = half(other.dmin);
      other.error = error(0, other.d, other.dmin);
      best.keep(greater(best.error, other.error), other);
    }
    return best;
  }

  Choice<G> two_levels(const F32* scale, const F32* offset) const {
    F32 d0, dmin0 = zero();
    if constexpr (G::kOffset) {
      F32 top = scale[0], deepest = negative(offset[0]);
      for (int s = 1; s < G::kSub; ++s) {
        top = max(top, scale[s]);
        deepest = max(deepest, negative(offset[s]));
      }
      d0 = top * splat(static_cast<float>(1.0 / G::kGreatest));
      dmin0 = deepest * splat(static_cast<float>(1.0 / G::kGreatest));
    } else {
      F32 top = scale[0], bottom = scale[0];
      for (int s = 1; s < G::kSub; ++s) {
        top = max(top, scale[s]);
        bottom = min(bottom, scale[s]);
      }
      d0 = select(greater_equal(top, negative(bottom)), top, bottom) * splat(static_cast<float>(1.0 / G::kLeast));
    }
    Choice<G> best, other;
    bool first = true;
    const F32 least = splat(static_cast<float>(G::kLeast)), greatest = splat(static_cast<float>(G::kGreatest));
    for (int i = 0; i < plan_.num_d; ++i) {
      F32 start[G::kSub], minima[G::kSub];
      const F32 d = half(d0 * splat(plan_.d_factors[i]));
      const F32 inverse_d = inverse(d);
      for (int s = 0; s < G::kSub; ++s) start[s] = nearest(scale[s] * inverse_d, least, greatest);
      for (int j = 0; j < (G::kOffset ? plan_.num_dmin : 1); ++j) {
        const F32 dmin = half(dmin0 * splat(G::kOffset ? plan_.dmin_factors[j] : 1.0f));
        const F32 inverse_dmin = inverse(dmin);
        for (int s = 0; s < G::kSub; ++s)
          minima[s] = G::kOffset ? nearest(negative(offset[s]) * inverse_dmin, zero(), greatest) : zero();
        neighbours(d, dmin, start, minima, first ? best : other);
        if (!first) best.keep(greater(best.error, other.error), other);
        first = false;
      }
    }
    for (int i = 0; i < plan_.polishes; ++i) {
      F32 d, dmin;
      least_squares(best, d, dmin);
      neighbours(half(d), half(dmin), best.scales, best.minima, other);
      best.keep(greater(best.error, other.error), other);
    }
    return best;
  }

  // The best integers of each sub-block within the radius of the given ones, super-scales fixed.
  EDGELLM_ENCODE_OUTLINE void neighbours(F32 d, F32 dmin, const F32* scales, const F32* minima, Choice<G>& out) const {
    const F32 least = splat(static_cast<float>(G::kLeast)), greatest = splat(static_cast<float>(G::kGreatest));
    const int radius = plan_.radius, minimum_radius = G::kOffset ? radius : 0;
    out.d = d;
    out.dmin = dmin;
    for (int s = 0; s < G::kSub; ++s) {
      const F32 scale0 = scales[s], minimum0 = minima[s];
      F32 best_error = splat(__builtin_inff()), best_scale = scale0, best_minimum = minimum0;
      for (int i = -radius; i <= radius; ++i) {
        const F32 tried = max(min(scale0 + splat(static_cast<float>(i)), greatest), least);
        for (int j = -minimum_radius; j <= minimum_radius; ++j) {
          const F32 minimum = max(min(minimum0 + splat(static_cast<float>(j)), greatest), zero());
          const F32 found = error(s, d * tried, negative(dmin * minimum));
          const Mask better = greater(best_error, found);
          best_error = select(better, found, best_error);
          best_scale = select(better, tried, best_scale);
          best_minimum = select(better, minimum, best_minimum);
        }
      }
      out.scales[s] = best_scale;
      out.minima[s] = best_minimum;
      out.error = s ? out.error + best_error : best_error;
    }
  }

  // The d and dmin that fit best with integers and codes fixed; the old ones where there is no solution.
  EDGELLM_ENCODE_OUTLINE void least_squares(const Choice<G>& choice, F32& d_out, F32& dmin_out) const {
    F32 sum_aa, sum_ax, sum_bb, sum_ab, sum_bx;
    for (int s = 0; s < G::kSub; ++s) {
      const F32 scale = choice.sub_scale(s), offset = choice.sub_offset(s), inverse_scale = inverse(scale);
      F32 aa = zero(), ax = zero(), sum_w = zero(), sum_wa = zero(), sum_wx = zero();
      for (int e = 0; e < G::kLen; ++e) {
        const int i = s * G::kLen + e;
        F32 a = code(s, e, inverse_scale, offset);
        if constexpr (G::kTwo) a = choice.scales[s] * a;
        const F32 wa = weighted(i, a);
        aa = aa + wa * a;
        ax = ax + wa * x_[i];
        if constexpr (G::kOffset) {
          sum_w = sum_w + weighted(i, splat(1.0f));
          sum_wa = sum_wa + wa;
          sum_wx = sum_wx + weighted(i, x_[i]);
        }
      }
      const F32 b = G::kTwo ? negative(choice.minima[s]) : splat(1.0f);
      const F32 bb = (b * b) * sum_w, ab = b * sum_wa, bx = b * sum_wx;
      sum_aa = s ? sum_aa + aa : aa;
      sum_ax = s ? sum_ax + ax : ax;
      sum_bb = s ? sum_bb + bb : bb;
      sum_ab = s ? sum_ab + ab : ab;
      sum_bx = s ? sum_bx + bx : bx;
    }
    if constexpr (!G::kOffset) {
      d_out = select(greater(sum_aa, splat(kTiny)), sum_ax * inverse(sum_aa), choice.d);
      dmin_out = choice.dmin;
    } else {
      const F32 det = sum_aa * sum_bb - sum_ab * sum_ab, inverse_det = inverse(det);
      const F32 d = (sum_bb * sum_ax - sum_ab * sum_bx) * inverse_det;
      const F32 dmin = (sum_aa * sum_bx - sum_ab * sum_ax) * inverse_det;
      Mask solved = greater(det, (sum_aa * sum_bb) * splat(1e-6f));
      const F32 alone = (sum_ax - choice.dmin * sum_ab) * inverse(sum_aa);
      Mask single = greater(sum_aa, splat(kTiny));
      if constexpr (G::kTwo) {
        solved = solved & greater(d, zero()) & greater_equal(dmin, zero());
        single = single & greater(alone, zero());
      }
      d_out = select(solved, d, select(single, alone, choice.d));
      dmin_out = select(solved, dmin, choice.dmin);
    }
  }

  const F32* x_;
  const F32* w_;
  const Plan& plan_;
};

}  // namespace edgellm::encode
