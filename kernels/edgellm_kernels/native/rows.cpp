#include "rows.h"

#include <cmath>
#include <vector>

#include "simd.h"

namespace edgellm {
namespace {

using namespace simd;

float sum_of_squares(const float* x, int64_t n) {
  F32 first = zero(), second = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const F32 a = load(x + i), b = load(x + i + kLanes);
    first = fma(a, a, first);
    second = fma(b, b, second);
  }
  float sum = sum_lanes(first + second);
  for (; i < n; ++i) sum = fma_one(x[i], x[i], sum);
  return sum;
}

}  // namespace

void rms_norm(const float* x, const float* gain, float eps, int64_t n, float* out) {
  const float factor = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
  const F32 factors = splat(factor);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * factors * load(gain + i));
  for (; i < n; ++i) out[i] = x[i] * factor * gain[i];
}

void add_rms_norm(
    const float* x, const float* residual, const float* gain, const float* post_gain, float eps, int64_t n, float* sum,
    float* out) {
  if (x == nullptr) {
    if (sum != residual) std::memmove(sum, residual, static_cast<size_t>(n) * 4);
  } else {
    if (post_gain != nullptr) {
      rms_norm(x, post_gain, eps, n, out);
      x = out;
    }
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(sum + i, load(residual + i) + load(x + i));
    for (; i < n; ++i) sum[i] = residual[i] + x[i];
  }
  rms_norm(sum, gain, eps, n, out);
}

void rope_angles(int64_t position, const float* frequencies, int64_t pairs, float factor, float* cos, float* sin) {
  for (int64_t i = 0; i < pairs; ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    cos[i] = std::cos(angle) * factor;
    sin[i] = std::sin(angle) * factor;
  }
}

// Products and sums are rounded one by one, as torch rounds them: what is stored is then equal bit for bit.
void rotate(float* x, const float* cos, const float* sin, int64_t pairs) {
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const F32 a = load(x + i), b = load(x + pairs + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + pairs + i, b * c + a * s);
  }
  for (; i < pairs; ++i) {
    const float a = x[i], b = x[pairs + i];
    x[i] = a * cos[i] - b * sin[i];
    x[pairs + i] = b * cos[i] + a * sin[i];
  }
}

void qk_norm_rope_store(const RopeStoreCall& call, int64_t token) {
  static thread_local std::vector<float> turned;
  const int64_t k_dim = call.pages.k_dim, v_dim = call.pages.v_dim, kv_heads = call.pages.kv_heads;
  const float *cos = call.cos + token * call.pairs, *sin = call.sin + token * call.pairs;
  const float* from = call.qkv + token * ((call.heads + kv_heads) * k_dim + kv_heads * v_dim);
  float* q = call.q + token * call.heads * k_dim;
  for (int64_t h = 0; h < call.heads; ++h, from += k_dim, q += k_dim) {
    if (call.q_norm != nullptr) rms_norm(from, call.q_norm, call.eps, k_dim, q);
    else std::memcpy(q, from, static_cast<size_t>(k_dim) * 4);
    rotate(q, cos, sin, call.pairs);
  }
  const int64_t slot = call.slots[token];
  if (slot < 0) return;
  turned.resize(static_cast<size_t>(k_dim));
  const KVSide keys = key_side(call.pages), values = value_side(call.pages);
  for (int64_t h = 0; h < kv_heads; ++h, from += k_dim) {
    if (call.k_norm != nullptr) rms_norm(from, call.k_norm, call.eps, k_dim, turned.data());
    else std::memcpy(turned.data(), from, static_cast<size_t>(k_dim) * 4);
    rotate(turned.data(), cos, sin, call.pairs);
    if (rotates_keys(call.pages)) hadamard(turned.data(), k_dim);
    encode_row(keys, keys.row(slot, h), turned.data());
  }
  for (int64_t h = 0; h < kv_heads; ++h, from += v_dim) encode_row(values, values.row(slot, h), from);
}

}  // namespace edgellm
