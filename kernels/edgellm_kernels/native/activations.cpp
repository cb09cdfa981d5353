#include "activations.h"

#include <cmath>
#include <limits>

#include "simd.h"

namespace edgellm {

using namespace simd;

namespace {

// Below this the inverse scale would not be finite; such a block counts as zero.
constexpr float kSmallest = 1e-30f;

}  // namespace

void quantize_row(const float* x, int64_t k, ActivationBlock* out) {
  for (int64_t block = 0; block < k / kActivationBlock; ++block, x += kActivationBlock, ++out) {
    F32 largest = zero(), trouble = zero();
    for (int i = 0; i < 4; ++i) {
      F32 value = load(x + 8 * i);
      largest = max(largest, abs(value));
      trouble = fma(value, zero(), trouble);  // NaN as soon as one value is not finite
    }
    const float peak = largest_lane(largest);
    const bool finite = sum_lanes(trouble) == 0.0f;
    const bool empty = !finite || peak < kSmallest;
    const F32 inverse = splat(empty ? 0.0f : 32767.0f / peak);
    int32_t sums[2];
    for (int half = 0; half < 2; ++half) {
      I32 codes[2];
      for (int i = 0; i < 2; ++i) {
        const F32 value = finite ? load(x + 16 * half + 8 * i) : zero();
        codes[i] = round_i32(value * inverse);
      }
      store_narrow(out->q + 16 * half, codes[0], codes[1]);
      sums[half] = sum_of_lanes(codes[0] + codes[1]);
    }
    out->sums[0] = sums[0];
    out->sums[1] = sums[1];
    out->scale = finite ? (empty ? 0.0f : peak / 32767.0f) : std::numeric_limits<float>::quiet_NaN();
    out->scaled_sum = out->scale * static_cast<float>(sums[0] + sums[1]);
  }
}

}  // namespace edgellm
