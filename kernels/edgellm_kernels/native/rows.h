// Work on rows of activations, one after another: norms, rotary angles, splitting of q, k and v. A row's result
// depends on the row alone, and sums run in one order.
#pragma once

#include "kv_pages.h"

namespace edgellm {

// out = x / sqrt(mean(x^2) + eps) * gain; out may be x.
void rms_norm(const float* x, const float* gain, float eps, int64_t n, float* out);

// sum = residual + x, with x normed by post_gain before where that is given, then out = rms_norm(sum) * gain.
// x null: nothing is added. sum may be residual.
void add_rms_norm(
    const float* x, const float* residual, const float* gain, const float* post_gain, float eps, int64_t n, float* sum,
    float* out);

// cos and sin [pairs] of position * frequencies[i], times factor. The angle is rounded to f32 as in rope.py.
void rope_angles(int64_t position, const float* frequencies, int64_t pairs, float factor, float* cos, float* sin);

// Element i of x[dim] turns with element i + pairs; those from 2 * pairs on stay.
void rotate(float* x, const float* cos, const float* sin, int64_t pairs);

// One row of fused q, k and v. Mirrored by native_structs.py.
struct RopeStoreCall {
  const float* qkv;     // [tokens, (heads + kv_heads) * k_dim + kv_heads * v_dim]
  float* q;             // [tokens, heads, k_dim]: rotated
  const float* q_norm;  // [k_dim] or null
  const float* k_norm;
  const float* cos;  // [tokens, pairs]
  const float* sin;
  KVPages pages;
  const int64_t* slots;  // [tokens], below 0: not stored
  int64_t heads, pairs, tokens;
  float eps;
};

void qk_norm_rope_store(const RopeStoreCall& call, int64_t token);

}  // namespace edgellm
