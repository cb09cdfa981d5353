// Activations as 16-bit integers with one f32 scale per 32: what the integer linears multiply.
//
// Range: the largest magnitude of a block becomes +-32767. The linears add up at most 32 products of it with weight
// codes of at most 8 bits in int32: 32 * 128 * 32767 < 2^31, so no sum can overflow, and pmaddwd's only overflow
// (both factors -32768) cannot occur. The error of an element is at most scale / 2 = max / 65534 of its block.
#pragma once

#include <cstdint>

namespace edgellm {

constexpr int64_t kActivationBlock = 32;

struct ActivationBlock {
  int16_t q[32];
  float scale;       // x = scale * q; NaN where the block holds an infinity or a NaN
  float scaled_sum;  // scale * (sums[0] + sums[1]): formats with a minimum per block multiply it
  int32_t sums[2];   // of q over the first and the last 16
};
static_assert(sizeof(ActivationBlock) == 80, "the caller allocates 80 bytes per 32 activations");

// One row of k activations, k a multiple of 32, into k / 32 blocks.
void quantize_row(const float* x, int64_t k, ActivationBlock* out);

}  // namespace edgellm
