// f32 kernels: weights decoded on the fly with the reference's bits, one fused multiply-add per weight, k after k.
#include <algorithm>

#include "formats.h"
#include "linear.h"

namespace edgellm {

using namespace simd;

namespace {

constexpr int64_t kChunk = 256;  // along K: 8 KiB of decoded weights per tile

// One unit -> [kUnit][8] f32.
template <class T> void decode_unit(const uint8_t* unit, float* out) {
  F32 scale[T::kUnit / T::kSpan], min[T::kUnit / T::kSpan];
  T::scales(unit, scale, min);
  const uint8_t* q = unit + T::kHeader;
  const I32 zero_code = splat_i32(T::kZero);
  F32 zeros = zero();
  if constexpr (kIsGrid<T>) zeros = T::zeros(unit);
  for (int b = 0; b < T::kUnit / 32; ++b, q += kCodeBytes<T::kBits>, out += 256) {
    for_pairs<T::kBits, 0, 16>(q, [&](int p, I16 codes) {
      const int span = (32 * b + 2 * p) / T::kSpan;
      I32 pair = as_i32(codes);
      I32 code[2] = {shift_right_signed(shift_left(pair, 16), 16), shift_right_signed(pair, 16)};
      for (int i = 0; i < 2; ++i) {
        F32 value = scale[span] * (kIsGrid<T> ? to_f32(code[i]) - zeros : to_f32(code[i] - zero_code));
        if constexpr (T::kMin && !kIsGrid<T>) value = value + min[span];
        store(out + 8 * (2 * p + i), value);
      }
    });
  }
}

// Weights first .. first + count of a tile as [count][8] f32; `scratch` holds them unless they lie there already.
const float* decode(const PackedWeight& weight, int64_t tile, int64_t first, int64_t count, float* scratch) {
  const uint8_t* data = weight.tile(tile);
  if (weight.format == Format::kF32) return reinterpret_cast<const float*>(data) + first * 8;
  if (is_dense(weight.format)) {
    const uint16_t* source = halves(data) + first * 8;
    for (int64_t i = 0; i < count; ++i)
      store(scratch + 8 * i, weight.format == Format::kF16 ? load_f16(source + 8 * i) : load_bf16(source + 8 * i));
    return scratch;
  }
  visit_format(weight.format, [&](auto type) {
    using T = decltype(type);
    const uint8_t* unit = data + first / T::kUnit * kUnitBytes<T>;
    for (int64_t i = 0; i < count; i += T::kUnit, unit += kUnitBytes<T>) decode_unit<T>(unit, scratch + 8 * i);
  });
  return scratch;
}

// How eight weights are read: decoded ones, or those of a dense format as they lie.
struct Decoded {
  using Element = float;
  static F32 read(const float* p) { return load(p); }
};
struct Half {
  using Element = uint16_t;
  static F32 read(const uint16_t* p) { return load_f16(p); }
};
struct BFloat {
  using Element = uint16_t;
  static F32 read(const uint16_t* p) { return load_bf16(p); }
};

template <class W, int TILES, int ROWS>
void multiply(const typename W::Element* const* weights, int64_t count, const float* x, int64_t stride, float* sums) {
  F32 sum[TILES][ROWS];
  for (int t = 0; t < TILES; ++t)
    for (int r = 0; r < ROWS; ++r) sum[t][r] = load(sums + r * kSumStride + t * kTileRows);
  for (int64_t i = 0; i < count; ++i) {
    F32 w[TILES];
#pragma GCC unroll 2
    for (int t = 0; t < TILES; ++t) w[t] = W::read(weights[t] + 8 * i);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      F32 value = splat(x[r * stride + i]);
#pragma GCC unroll 2
      for (int t = 0; t < TILES; ++t) sum[t][r] = fma(w[t], value, sum[t][r]);
#pragma GCC unroll 2
      for (int t = 0; t < TILES; ++t) pin(sum[t][r]);
    }
  }
  for (int t = 0; t < TILES; ++t)
    for (int r = 0; r < ROWS; ++r) store(sums + r * kSumStride + t * kTileRows, sum[t][r]);
}

template <class W, int TILES>
void multiply_rows(const typename W::Element* const* weights, int64_t count, const float* x, int64_t stride,
                   int64_t rows, float* sums) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) multiply<W, TILES, 4>(weights, count, x + r * stride, stride, sums + r * kSumStride);
  for (; r < rows; ++r) multiply<W, TILES, 1>(weights, count, x + r * stride, stride, sums + r * kSumStride);
}

// 16-bit weights that so few rows read are converted where they are used: a detour through the cache costs more than
// the products.
constexpr int64_t kFewDenseRows = 4;

template <class W>
void dense_panel(const PackedWeight& weight, int64_t tile, int tiles, const float* x, int64_t rows, float* sums) {
  for (int64_t first = 0; first < weight.k; first += kChunk) {
    const int64_t count = std::min(kChunk, weight.k - first);
    const uint16_t* weights[kPanelTiles];
    for (int t = 0; t < tiles; ++t) weights[t] = halves(weight.tile(tile + t)) + first * 8;
    if (tiles == 2) multiply_rows<W, 2>(weights, count, x + first, weight.k, rows, sums);
    else multiply_rows<W, 1>(weights, count, x + first, weight.k, rows, sums);
  }
}

}  // namespace

void exact_panel(const PackedWeight& weight, int64_t tile, int tiles, const float* x, int64_t rows, float* sums) {
  for (int64_t i = 0; i < rows * kSumStride; i += kLanes) store(sums + i, zero());
  if (rows <= kFewDenseRows && weight.format == Format::kF16) return dense_panel<Half>(weight, tile, tiles, x, rows, sums);
  if (rows <= kFewDenseRows && weight.format == Format::kBF16) return dense_panel<BFloat>(weight, tile, tiles, x, rows, sums);
  alignas(64) float scratch[kPanelTiles][kChunk * 8];
  for (int64_t first = 0; first < weight.k; first += kChunk) {
    const int64_t count = std::min(kChunk, weight.k - first);
    const float* weights[kPanelTiles];
    for (int t = 0; t < tiles; ++t) weights[t] = decode(weight, tile + t, first, count, scratch[t]);
    if (tiles == 2) multiply_rows<Decoded, 2>(weights, count, x + first, weight.k, rows, sums);
    else multiply_rows<Decoded, 1>(weights, count, x + first, weight.k, rows, sums);
  }
}

void decode_row(const PackedWeight& weight, int64_t row, float scale, float* out) {
  alignas(64) float scratch[kChunk * 8];
  for (int64_t first = 0; first < weight.k; first += kChunk) {
    const int64_t count = std::min(kChunk, weight.k - first);
    const float* values = decode(weight, row / kTileRows, first, count, scratch);
    for (int64_t i = 0; i < count; ++i) {
      float value = values[8 * i + row % kTileRows];
      out[first + i] = scale == 1.0f ? value : value * scale;
    }
  }
}

}  // namespace edgellm
