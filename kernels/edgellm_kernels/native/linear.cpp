#include "linear.h"

#include <algorithm>
#include <cstring>

namespace edgellm {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// sums [rows][kSumStride] -> output columns from `first` on: + bias, + add.
void write_out(const PackedWeight& weight, const LinearOutput& output, int64_t row, int64_t rows, int64_t first, int64_t columns, const float* sums) {
  for (int64_t r = 0; r < rows; ++r, sums += kSumStride) {
    float* out = output.data + (row + r) * output.stride + first;
    if (weight.bias == nullptr && output.add == nullptr) {
      std::memcpy(out, sums, static_cast<size_t>(columns) * sizeof(float));
      continue;
    }
    const float* add = output.add == nullptr ? nullptr : output.add + (row + r) * output.stride + first;
    for (int64_t c = 0; c < columns; ++c) {
      float value = sums[c];
      if (weight.bias != nullptr) value += weight.bias[first + c];
      if (add != nullptr) value += add[c];
      out[c] = value;
    }
  }
}

}  // namespace

int64_t linear_tasks(const PackedWeight& weight, int64_t rows) {
  return divide_up(weight.tiles(), kPanelTiles) * divide_up(rows, kPanelRows);
}

void linear_task(const PackedWeight& weight, const LinearInput& input, const LinearOutput& output, int64_t task) {
  const int64_t row_panels = divide_up(input.rows, kPanelRows);
  const int64_t tile = task / row_panels * kPanelTiles, row = task % row_panels * kPanelRows;
  const int tiles = static_cast<int>(std::min<int64_t>(kPanelTiles, weight.tiles() - tile));
  const int64_t rows = std::min(kPanelRows, input.rows - row), blocks = weight.k / kActivationBlock;
  const int64_t first = tile * kTileRows, columns = std::min(weight.n - first, tiles * kTileRows);
  alignas(64) float sums[kPanelRows * kSumStride];
  if (input.quantized == nullptr || !has_integer_kernel(weight.format)) {
    exact_panel(weight, tile, tiles, input.values + row * weight.k, rows, sums);
  } else if (rows <= kFewRows) {
    integer_rows(weight, tile, tiles, input.quantized + row * blocks, rows, sums);
  } else {
    integer_panel(weight, tile, tiles, input.quantized + row * blocks, rows, sums);
  }
  write_out(weight, output, row, rows, first, columns, sums);
}

}  // namespace edgellm
