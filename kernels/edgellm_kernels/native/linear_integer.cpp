// Integer kernels: codes of the weights times 16-bit activations, summed exactly per block of 32 (or span of 16).
//
// Lane = row of the weight, so no sum crosses lanes. Both kernels do the same floating-point operations in the same
// order; inside a block integers are exact in any order (see activations.h for the range).
#include "formats.h"
#include "linear.h"

#include <type_traits>

namespace edgellm {

using namespace simd;

namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T> constexpr int kSpans = 32 / T::kSpan;  // scales per block of 32

inline F32 add_product(F32 sum, I32 product, F32 scale, float x_scale) {
  return fma(to_f32(product), scale * splat(x_scale), sum);
}

// What the minimum of span s multiplies.
template <int SPANS> inline float sum_of(const ActivationBlock& x, int s) {
  if constexpr (SPANS == 1) return x.scaled_sum;
  return x.scale * static_cast<float>(x.sums[s]);
}

// The start of an integer sum: -zero * (sum of the activations), which takes the codes' zero point off.
template <int SPANS> inline int32_t offset_of(const ActivationBlock& x, int s, int32_t zero_code) {
  if constexpr (SPANS == 1) return -zero_code * (x.sums[0] + x.sums[1]);
  return -zero_code * x.sums[s];
}

constexpr int64_t kPrefetchBytes = 4096;  // ahead of the unit in use; past the end it is harmless

// Into the second-level cache: the first waits for so few lines at once that memory would be read at half its speed.
inline void fetch_ahead(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

// ROWS rows of activations, `stride` blocks apart, times one tile: sums [row][kSumStride]. Codes go from memory to
// the multiplications through registers, once for all rows.
template <class T, int ROWS>
void multiply_tile(const uint8_t* unit, const ActivationBlock* x, int64_t stride, int64_t k, float* sums) {
  constexpr int S = kSpans<T>, C = ROWS == 1 ? 2 : S;  // one row: two integer sums, for the adder's latency
  F32 sum[ROWS];
  for (int r = 0; r < ROWS; ++r) sum[r] = zero();
  for (int64_t u = 0; u < k / T::kUnit; ++u, unit += kUnitBytes<T>) {
    F32 scale[T::kUnit / T::kSpan], min[T::kUnit / T::kSpan];
    T::scales(unit, scale, min);
    const uint8_t* q = unit + T::kHeader;
    // While it works for several rows the processor does not look ahead far enough to hide the memory's latency.
    if constexpr (ROWS > 1)
      for (int64_t line = 0; line < kUnitBytes<T>; line += 64) fetch_ahead(unit + kPrefetchBytes + line);
#pragma GCC unroll 1
    for (int b = 0; b < T::kUnit / 32; ++b, ++x, q += kCodeBytes<T::kBits>) {
      I32 product[ROWS][2];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        product[r][0] = product[r][1] = splat_i32(0);
        if constexpr (T::kZero != 0) {
          product[r][0] = splat_i32(offset_of<S>(x[r * stride], 0, T::kZero));
          if constexpr (S == 2) product[r][1] = splat_i32(offset_of<S>(x[r * stride], 1, T::kZero));
        }
      }
      for_pairs<T::kBits, 0, 16>(q, [&](int p, I16 codes) {
        const int c = S == 2 ? p / 8 : p % C;
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          product[r][c] = dot_pairs(product[r][c], codes, splat_pair(x[r * stride].q + 2 * p));
          if constexpr (ROWS > 1) pin(product[r][c]);
        }
      });
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const ActivationBlock& row = x[r * stride];
          I32 total = C == S ? product[r][s] : product[r][0] + product[r][1];
          sum[r] = add_product(sum[r], total, scale[b * S + s], row.scale);
          if constexpr (T::kMin) sum[r] = fma(min[b * S + s], splat(sum_of<S>(row, s)), sum[r]);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) store(sums + r * kSumStride, sum[r]);
}

// Few rows of activations times two tiles, straight from the units: a pair of activations serves both tiles, a code
// all rows.
template <class T, int ROWS>
void multiply_two_tiles(
    const uint8_t* first, const uint8_t* second, const ActivationBlock* x, int64_t stride, int64_t k, float* sums) {
  constexpr int S = kSpans<T>, C = ROWS <= (kManyRegisters ? 3 : 2) ? 2 : 1;  // few rows: two integer sums each, for the adder's latency
  const uint8_t* unit[2] = {first, second};
  // The same place of the next two tiles: what lies nearer is this tile's rest, or the other's, on its way already.
  const int64_t pair = 2 * (second - first), ahead = pair > kPrefetchBytes ? pair : kPrefetchBytes;
  constexpr bool kKeep = ROWS <= 5;  // more sums than registers: they wait in the caller's memory
  F32 sum[2][ROWS];
  for (int t = 0; t < 2; ++t) {
    for (int r = 0; r < ROWS; ++r) {
      sum[t][r] = zero();
      if constexpr (!kKeep) store(sums + r * kSumStride + t * kTileRows, zero());
    }
  }
  for (int64_t u = 0; u < k / T::kUnit; ++u) {
    F32 scale[2][T::kUnit / T::kSpan], min[2][T::kUnit / T::kSpan];
    const uint8_t* q[2];
    for (int t = 0; t < 2; ++t) {
      T::scales(unit[t], scale[t], min[t]);
      q[t] = unit[t] + T::kHeader;
      for (int64_t line = 0; line < kUnitBytes<T>; line += 64) fetch_ahead(unit[t] + ahead + line);
      unit[t] += kUnitBytes<T>;
    }
#pragma GCC unroll 1
    for (int b = 0; b < T::kUnit / 32; ++b, ++x) {
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) {
        I32 product[2][ROWS], other[2][ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
          {
          product[0][r] = product[1][r] = splat_i32(T::kZero == 0 ? 0 : offset_of<S>(x[r * stride], s, T::kZero));
          if constexpr (C == 2) other[0][r] = other[1][r] = splat_i32(0);
        }
#pragma GCC unroll 16
        for (int p = 16 / S * s; p < 16 / S * (s + 1); ++p) {
          const I16 codes[2] = {codes_at<T::kBits>(q[0], p), codes_at<T::kBits>(q[1], p)};
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            const I16 pair = splat_pair(x[r * stride].q + 2 * p);
            auto& into = C == 2 && p % 2 == 1 ? other : product;
            into[0][r] = dot_pairs(into[0][r], codes[0], pair);
            into[1][r] = dot_pairs(into[1][r], codes[1], pair);
            pin(into[0][r]);
            pin(into[1][r]);
          }
        }
#pragma GCC unroll 2
        for (int t = 0; t < 2; ++t) {
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            const ActivationBlock& row = x[r * stride];
            const I32 total = C == 2 ? product[t][r] + other[t][r] : product[t][r];
            F32 so_far = kKeep ? sum[t][r] : load(sums + r * kSumStride + t * kTileRows);
            so_far = add_product(so_far, total, scale[t][b * S + s], row.scale);
            if constexpr (T::kMin) so_far = fma(min[t][b * S + s], splat(sum_of<S>(row, s)), so_far);
            if constexpr (kKeep) sum[t][r] = so_far;
            else store(sums + r * kSumStride + t * kTileRows, so_far);
          }
        }
      }
      q[0] += kCodeBytes<T::kBits>;
      q[1] += kCodeBytes<T::kBits>;
    }
  }
  if constexpr (kKeep) {
    for (int t = 0; t < 2; ++t)
      for (int r = 0; r < ROWS; ++r) store(sums + r * kSumStride + t * kTileRows, sum[t][r]);
  }
}

constexpr int kChunkBlocks = 16;  // of 32 weights: 512 along K, 16 KiB of codes for two tiles

struct Panel {
  alignas(64) int16_t codes[kPanelTiles][kChunkBlocks][16][16];
  alignas(64) float scale[kPanelTiles][kChunkBlocks][2][8];
  alignas(64) float min[kPanelTiles][kChunkBlocks][2][8];
};

// `ahead` bytes behind the unit lies the same place of the tiles that come next.
template <class T> void unpack(const uint8_t* unit, int64_t ahead, int blocks, int tile, Panel& panel) {
  for (int first = 0; first < blocks; first += T::kUnit / 32, unit += kUnitBytes<T>) {
    for (int64_t line = 0; line < kUnitBytes<T>; line += 64) fetch_ahead(unit + ahead + line);
    F32 scale[T::kUnit / T::kSpan], min[T::kUnit / T::kSpan];
    T::scales(unit, scale, min);
    const uint8_t* q = unit + T::kHeader;
    for (int b = 0; b < T::kUnit / 32; ++b, q += kCodeBytes<T::kBits>) {
      for_pairs<T::kBits, 0, 16>(q, [&](int p, I16 codes) { store_i16(panel.codes[tile][first + b][p], codes); });
      for (int s = 0; s < kSpans<T>; ++s) {
        store(panel.scale[tile][first + b][s], scale[b * kSpans<T> + s]);
        if constexpr (T::kMin) store(panel.min[tile][first + b][s], min[b * kSpans<T> + s]);
      }
    }
  }
}

// ROWS rows of activations, `stride` blocks apart, times TILES tiles: sums [row][kSumStride] grow by the chunk.
template <int TILES, int ROWS, int SPANS, bool MIN>
void multiply(const Panel& panel, int blocks, int32_t zero_code, const ActivationBlock* x, int64_t stride, float* sums) {
  F32 sum[TILES][ROWS];
  for (int t = 0; t < TILES; ++t)
    for (int r = 0; r < ROWS; ++r) sum[t][r] = load(sums + r * kSumStride + t * kTileRows);
  for (int b = 0; b < blocks; ++b, ++x) {
#pragma GCC unroll 2
    for (int s = 0; s < SPANS; ++s) {
      I32 product[TILES][ROWS];
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int t = 0; t < TILES; ++t) product[t][r] = splat_i32(offset_of<SPANS>(x[r * stride], s, zero_code));
#pragma GCC unroll 16
      for (int p = 16 / SPANS * s; p < 16 / SPANS * (s + 1); ++p) {
        I16 codes[TILES];
#pragma GCC unroll 2
        for (int t = 0; t < TILES; ++t) codes[t] = load_i16(panel.codes[t][b][p]);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          I16 pair = splat_pair(x[r * stride].q + 2 * p);
#pragma GCC unroll 2
          for (int t = 0; t < TILES; ++t) product[t][r] = dot_pairs(product[t][r], codes[t], pair);
#pragma GCC unroll 2
          for (int t = 0; t < TILES; ++t) pin(product[t][r]);
        }
      }
#pragma GCC unroll 2
      for (int t = 0; t < TILES; ++t) {
        F32 scale = load(panel.scale[t][b][s]);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          const ActivationBlock& row = x[r * stride];
          sum[t][r] = add_product(sum[t][r], product[t][r], scale, row.scale);
          if constexpr (MIN) sum[t][r] = fma(load(panel.min[t][b][s]), splat(sum_of<SPANS>(row, s)), sum[t][r]);
        }
      }
    }
  }
  for (int t = 0; t < TILES; ++t)
    for (int r = 0; r < ROWS; ++r) store(sums + r * kSumStride + t * kTileRows, sum[t][r]);
}

template <int TILES, int SPANS, bool MIN>
void multiply_rows(const Panel& panel, int blocks, int32_t zero_code, const ActivationBlock* x, int64_t stride, int64_t rows, float* sums) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4)
    multiply<TILES, 4, SPANS, MIN>(panel, blocks, zero_code, x + r * stride, stride, sums + r * kSumStride);
  for (; r + 2 <= rows; r += 2)
    multiply<TILES, 2, SPANS, MIN>(panel, blocks, zero_code, x + r * stride, stride, sums + r * kSumStride);
  if (r < rows) multiply<TILES, 1, SPANS, MIN>(panel, blocks, zero_code, x + r * stride, stride, sums + r * kSumStride);
}

}  // namespace

void integer_rows(const PackedWeight& weight, int64_t tile, int tiles, const ActivationBlock* x, int64_t rows, float* sums) {
  const int64_t k = weight.k, stride = k / kActivationBlock;
  visit_format(weight.format, [&](auto type) {
    using T = decltype(type);
    int64_t done = 0;
    // Bytes need no unpacking that eight rows could share, and twice four overlaps better with the memory.
    constexpr int64_t kMost = kManyRegisters && T::kBits < 8 ? 8 : 4;
    const auto both = [&](auto size, int64_t count) {
      if (count == size.value)
        multiply_two_tiles<T, size.value>(
            weight.tile(tile), weight.tile(tile + 1), x + done * stride, stride, k, sums + done * kSumStride);
    };
#ifdef EDGELLM_AVX2
    // In groups of about the same size: unpacking all codes costs a group of one row as much as one of many.
    for (int64_t groups = divide_up(rows, kMost); tiles == 2 && rows - done > 1; --groups) {
      const int64_t count = divide_up(rows - done, groups);
      both(std::integral_constant<int, 2>{}, count);
      both(std::integral_constant<int, 3>{}, count);
      both(std::integral_constant<int, 4>{}, count);
      if constexpr (kMost == 8) {
        both(std::integral_constant<int, 5>{}, count);
        both(std::integral_constant<int, 6>{}, count);
        both(std::integral_constant<int, 7>{}, count);
        both(std::integral_constant<int, 8>{}, count);
      }
      done += count;
    }
#else  // without intrinsics each size takes the compiler long
    for (; tiles == 2 && done + kMost <= rows; done += kMost) both(std::integral_constant<int, kMost>{}, kMost);
#endif
    for (int t = 0; t < tiles; ++t) {
      const uint8_t* data = weight.tile(tile + t);
      float* out = sums + t * kTileRows;
      int64_t r = done;
      for (; r + 2 <= rows; r += 2) multiply_tile<T, 2>(data, x + r * stride, stride, k, out + r * kSumStride);
      if (r < rows) multiply_tile<T, 1>(data, x + r * stride, stride, k, out + r * kSumStride);
    }
  });
}

void integer_panel(const PackedWeight& weight, int64_t tile, int tiles, const ActivationBlock* x, int64_t rows, float* sums) {
  const int64_t blocks = weight.k / kActivationBlock;
  for (int64_t i = 0; i < rows * kSumStride; i += kLanes) store(sums + i, zero());
  visit_format(weight.format, [&](auto type) {
    using T = decltype(type);
    Panel panel;
    for (int64_t first = 0; first < blocks; first += kChunkBlocks) {
      const int count = static_cast<int>(blocks - first < kChunkBlocks ? blocks - first : kChunkBlocks);
      for (int t = 0; t < tiles; ++t)
        unpack<T>(
            weight.tile(tile + t) + first * 32 / T::kUnit * kUnitBytes<T>, tiles * weight.tile_bytes(), count, t, panel);
      if (tiles == 2)
        multiply_rows<2, kSpans<T>, T::kMin>(panel, count, T::kZero, x + first, blocks, rows, sums);
      else
        multiply_rows<1, kSpans<T>, T::kMin>(panel, count, T::kZero, x + first, blocks, rows, sums);
    }
  });
}

}  // namespace edgellm
