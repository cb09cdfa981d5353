// Products of a tile's queries, keys and values: a score is a dot product over eight lanes, a weighted value grows key
// by key. How many rows are computed together changes no bit.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention.h"
#include "kv_lanes.h"

namespace edgellm {

// The K or V of a tile's columns, each where it lies: in the pages, or decoded.
struct TileRows {
  int64_t type = kKVF32;
  bool in_place = false;
  const uint8_t* data[kTileKeys];
  float scales[kTileKeys];  // of int8 rows
};

template <class F> void visit_type(int64_t type, F&& visit) {
  switch (type) {
    case kKVF32: visit(std::integral_constant<int64_t, kKVF32>{}); break;
    case kKVF16: visit(std::integral_constant<int64_t, kKVF16>{}); break;
    case kKVBF16: visit(std::integral_constant<int64_t, kKVBF16>{}); break;
    default: visit(std::integral_constant<int64_t, kKVInt8>{}); break;
  }
}

// scores[m][column .. column + 3] of kRows rows.
template <int64_t kType, int kRows>
void dot_block(const float* q, int64_t dim, const TileRows& keys, int64_t column, float* scores) {
  using namespace simd;
  const uint8_t* const* k = keys.data + column;
  F32 sums[kRows][4], scale[4];
  for (int c = 0; c < 4; ++c) scale[c] = kType == kKVInt8 ? splat(keys.scales[column + c]) : zero();
  for (int m = 0; m < kRows; ++m) {
    for (int c = 0; c < 4; ++c) sums[m][c] = zero();
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    F32 key[4];
    for (int c = 0; c < 4; ++c) key[c] = load_lanes<kType>(k[c], d, scale[c]);
    for (int m = 0; m < kRows; ++m) {
      const F32 query = load(q + m * dim + d);
      for (int c = 0; c < 4; ++c) sums[m][c] = fma(query, key[c], sums[m][c]);
    }
  }
  for (int m = 0; m < kRows; ++m)
    store_sums(scores + m * kTileKeys + column, sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
}

// The same of `rows` rows.
template <int64_t kType>
void dot_rows(const float* q, int64_t rows, int64_t dim, const TileRows& keys, int64_t column, float* scores) {
  int64_t m = 0;
  if constexpr (simd::kManyRegisters)
    for (; m + 6 <= rows; m += 6) dot_block<kType, 6>(q + m * dim, dim, keys, column, scores + m * kTileKeys);
  for (; m + 3 <= rows; m += 3) dot_block<kType, 3>(q + m * dim, dim, keys, column, scores + m * kTileKeys);
  if (rows - m == 2) dot_block<kType, 2>(q + m * dim, dim, keys, column, scores + m * kTileKeys);
  if (rows - m == 1) dot_block<kType, 1>(q + m * dim, dim, keys, column, scores + m * kTileKeys);
}

// sums over columns first .. last - 1 of weights[m][column] * values[column][d .. d + 15], key by key; then
// out = old_share * out + new_share * sums.
template <int64_t kType, int kRows>
void weigh_block(
    const float* weights, const TileRows& values, int64_t v_dim, int64_t d, int64_t first, int64_t last,
    const float* old_share, const float* new_share, float* out) {
  using namespace simd;
  F32 low[kRows], high[kRows];
  for (int m = 0; m < kRows; ++m) low[m] = high[m] = zero();
  for (int64_t c = first; c < last; ++c) {
    const F32 scale = kType == kKVInt8 ? splat(values.scales[c]) : zero();
    const F32 v0 = load_lanes<kType>(values.data[c], d, scale);
    const F32 v1 = load_lanes<kType>(values.data[c], d + kLanes, scale);
    for (int m = 0; m < kRows; ++m) {
      const F32 w = splat(weights[m * kTileKeys + c]);
      low[m] = fma(w, v0, low[m]);
      high[m] = fma(w, v1, high[m]);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    const F32 a = splat(old_share[m]), b = splat(new_share[m]);
    float* row = out + m * v_dim + d;
    store(row, fma(low[m], b, load(row) * a));
    store(row + kLanes, fma(high[m], b, load(row + kLanes) * a));
  }
}

// The same for `rows` rows: weights [rows][kTileKeys], shares [rows], out [rows][v_dim].
template <int64_t kType>
void weigh_rows_of(
    const float* weights, const TileRows& values, int64_t rows, int64_t v_dim, int64_t first, int64_t last,
    const float* old_share, const float* new_share, float* out_rows) {
  constexpr int kBlock = 6;
  for (int64_t m = 0; m < rows;) {
    const int64_t count = std::min<int64_t>(kBlock, rows - m);
    for (int64_t d = 0; d < v_dim; d += 2 * simd::kLanes) {
      const float* w = weights + m * kTileKeys;
      const float *a = old_share + m, *b = new_share + m;
      const TileRows& v = values;
      float* out = out_rows + m * v_dim;
      switch (count) {
        case 6: weigh_block<kType, 6>(w, v, v_dim, d, first, last, a, b, out); break;
        case 5: weigh_block<kType, 5>(w, v, v_dim, d, first, last, a, b, out); break;
        case 4: weigh_block<kType, 4>(w, v, v_dim, d, first, last, a, b, out); break;
        case 3: weigh_block<kType, 3>(w, v, v_dim, d, first, last, a, b, out); break;
        case 2: weigh_block<kType, 2>(w, v, v_dim, d, first, last, a, b, out); break;
        default: weigh_block<kType, 1>(w, v, v_dim, d, first, last, a, b, out); break;
      }
    }
    m += count;
  }
}

}  // namespace edgellm
