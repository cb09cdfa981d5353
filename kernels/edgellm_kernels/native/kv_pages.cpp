#include "kv_pages.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kv_lanes.h"

namespace edgellm {
namespace {

using namespace simd;

uint16_t f32_to_f16(float x) {
  float row[kLanes] = {x};
  uint16_t out[kLanes];
  store_f16(out, load(row));
  return out[0];
}

uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isnan(x)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// symmetric, scale = largest / 127 in f16; elements beyond 127 steps saturate, NaN counts as 0
void encode_int8(const float* x, int64_t dim, int8_t* out, uint16_t* scale_out) {
  F32 peak = zero(), odd = zero();
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const F32 v = load(x + i);
    peak = max(peak, abs(v));
    odd = fma(v, zero(), odd);  // NaN as soon as an element is not finite
  }
  float largest = max_lanes(peak), oddity = sum_lanes(odd);
  for (; i < dim; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
    oddity += x[i] * 0.0f;
  }
  const bool finite = oddity == 0.0f;
  if (!finite) {
    largest = 0.0f;
    for (int64_t j = 0; j < dim; ++j) largest = std::isnan(x[j]) ? x[j] : std::max(largest, std::fabs(x[j]));
    for (int64_t j = 0; j < dim; ++j) largest = std::isnan(x[j]) ? x[j] : largest;
  }
  float exact = largest / 127.0f;
  if (exact > 65504.0f && std::isfinite(exact)) exact = 65504.0f;
  *scale_out = f32_to_f16(exact);
  float divisor = f16_one(*scale_out);
  if (divisor == 0.0f) divisor = std::numeric_limits<float>::infinity();
  i = 0;
  if (finite) {
    for (; i + kLanes <= dim; i += kLanes) {
      F32 steps = load(x + i) / splat(divisor);
      steps = min(max(steps, splat(-127.0f)), splat(127.0f));
      int32_t wide[kLanes];
      store_i32(wide, round_i32(steps));
      for (int j = 0; j < kLanes; ++j) out[i + j] = static_cast<int8_t>(wide[j]);
    }
  }
  for (; i < dim; ++i) {
    const float steps = x[i] / divisor;
    out[i] = std::isnan(steps) ? 0 : static_cast<int8_t>(std::nearbyint(std::clamp(steps, -127.0f, 127.0f)));
  }
}

}  // namespace

bool tables_fit(const KVPages& pages, const GroupTables& tables, const BatchRows& rows) {
  const int64_t slots = pages.blocks * pages.block_size;
  if (pages.block_size < 1 || pages.kv_heads < 1 || pages.k_dim < 1 || pages.v_dim < 1) return false;
  if (rows.sequences < 0 || tables.max_blocks < 0 || rows.query_starts[0] < 0) return false;
  for (int64_t s = 0; s < rows.sequences; ++s) {
    if (rows.query_starts[s + 1] < rows.query_starts[s]) return false;
    for (int64_t b = 0; b < tables.max_blocks; ++b) {
      const int64_t block = tables.block_table[s * tables.max_blocks + b];
      if (block < -1 || block >= pages.blocks) return false;
    }
  }
  if (rows.query_starts[rows.sequences] > rows.tokens) return false;
  for (int64_t t = 0; t < rows.tokens; ++t) {
    if (tables.slot_mapping[t] >= slots) return false;
  }
  return true;
}

void hadamard(float* x, int64_t dim) {
  for (int64_t step = 1; step < dim; step *= 2) {
    for (float *low = x, *high = x + step; high < x + dim; low += 2 * step, high += 2 * step) {
      int64_t i = 0;
      for (; i + kLanes <= step; i += kLanes) {
        const F32 a = load(low + i), b = load(high + i);
        store(low + i, a + b);
        store(high + i, a - b);
      }
      for (; i < step; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
  const float norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)));
  for (int64_t i = 0; i < dim; ++i) x[i] *= norm;
}

namespace {

template <int64_t kType> float load_one(const void* data, int64_t at, float scale) {
  if constexpr (kType == kKVF32) return static_cast<const float*>(data)[at];
  if constexpr (kType == kKVF16) return f16_one(static_cast<const uint16_t*>(data)[at]);
  if constexpr (kType == kKVBF16) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[at]) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  return static_cast<float>(static_cast<const int8_t*>(data)[at]) * scale;
}

template <int64_t kType>
void decode(const KVSide& side, const int64_t* slots, int64_t count, int64_t head, float* out, int64_t width) {
  const int64_t dim = side.dim;
  for (int64_t c = 0; c < count; ++c, out += width) {
    if constexpr (kType == kKVF32) {  // narrower rows come fast enough
      constexpr int64_t kAhead = 16;
      const int64_t later = c + kAhead < count ? slots[c + kAhead] : -1;
      const float* row = static_cast<const float*>(side.data) + side.row(std::max<int64_t>(later, 0), head) * dim;
      for (int64_t i = 0; later >= 0 && i < dim; i += 16) __builtin_prefetch(row + i);
    }
    if (slots[c] < 0) {
      std::fill(out, out + width, 0.0f);
      continue;
    }
    const int64_t row = side.row(slots[c], head), start = row * dim;
    const float scale = kType == kKVInt8 ? f16_one(side.scales[row]) : 1.0f;
    const F32 scales = splat(scale);
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) store(out + i, load_lanes<kType>(side.data, start + i, scales));
    for (; i < dim; ++i) out[i] = load_one<kType>(side.data, start + i, scale);
    for (; i < width; ++i) out[i] = 0.0f;
  }
}

}  // namespace

void decode_rows(const KVSide& side, const int64_t* slots, int64_t count, int64_t head, float* out, int64_t width) {
  if (side.type == kKVF32) decode<kKVF32>(side, slots, count, head, out, width);
  else if (side.type == kKVF16) decode<kKVF16>(side, slots, count, head, out, width);
  else if (side.type == kKVBF16) decode<kKVBF16>(side, slots, count, head, out, width);
  else decode<kKVInt8>(side, slots, count, head, out, width);
}

void encode_row(const KVSide& side, int64_t row, const float* x) {
  const int64_t dim = side.dim, start = row * dim;
  if (side.type == kKVF32) {
    std::memcpy(static_cast<float*>(side.data) + start, x, static_cast<size_t>(dim) * 4);
  } else if (side.type == kKVF16) {
    uint16_t* out = static_cast<uint16_t*>(side.data) + start;
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) store_f16(out + i, load(x + i));
    for (; i < dim; ++i) out[i] = f32_to_f16(x[i]);
  } else if (side.type == kKVBF16) {
    uint16_t* out = static_cast<uint16_t*>(side.data) + start;
    for (int64_t i = 0; i < dim; ++i) out[i] = f32_to_bf16(x[i]);
  } else {
    encode_int8(x, dim, static_cast<int8_t*>(side.data) + start, side.scales + row);
  }
}

}  // namespace edgellm
