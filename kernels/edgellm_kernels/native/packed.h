// The form in which the linears hold a weight: the file's own numbers, eight rows interleaved, the file's size.
//
//   weight = tiles of 8 rows; tile = units along K; unit = 32 weights (256 for the k-quants) of each of the 8 rows
//   unit   = header (scales of the 8 rows) | codes of the first 32 weights | codes of the next 32 ...
//
// Codes of 32 weights x 8 rows are planes of 32-bit lanes, lane r holding row r. A lane's low half belongs to even k
// and its high half to odd k, so that shift and mask leave the two int16 that pmaddwd multiplies:
//
//   4-bit plane, 4 vectors: vector j, shift 4i  -> weights 8j + 2i and 8j + 2i + 1       (i = 0..3)
//   2-bit plane, 2 vectors: vector h, shift 2p  -> weights 16h + 2p and 16h + 2p + 1     (p = 0..7)
//   1-bit plane, 1 vector:            shift p   -> weights 2p and 2p + 1                 (p = 0..15)
//   bytes, 8 vectors: 16 bytes per pair p: row r's weights 2p and 2p + 1 at bytes 2r and 2r + 1
//
// 4 bits = the 4-bit plane; 5 = that and a 1-bit plane; 6 = that and a 2-bit plane; 2 = the 2-bit plane; 3 = that
// and a 1-bit plane. Grids (GPTQ, AWQ) have no blocks in their files; the caller makes them, a unit of 32, 64 or 128
// weights that share scale and zero point: f16 scale, zero byte, codes (nibbles: byte j holds weights 2j and 2j + 1).
// Their header is scales, zeros. Dense weights: k after k, the 8 rows' values beside each other. Rows behind the last are zero.
#pragma once

#include <cstdint>

namespace edgellm {

// The type ids of ggml.h, and from 1001 on grids: kGrid BITS x WEIGHTS of a unit.
enum class Format : int32_t {
  kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ5_0 = 6, kQ5_1 = 7, kQ8_0 = 8,
  kQ2_K = 10, kQ3_K = 11, kQ4_K = 12, kQ5_K = 13, kQ6_K = 14, kBF16 = 30,
  kGrid4x32 = 1001, kGrid4x64 = 1002, kGrid4x128 = 1003, kGrid8x32 = 1004, kGrid8x128 = 1005,
};

constexpr int64_t kTileRows = 8;

struct FormatInfo {
  int64_t unit;   // weights of a block
  int64_t bytes;  // bytes of a block
};

// unit 0: not a format.
constexpr FormatInfo format_info(Format format) {
  switch (format) {
    case Format::kF32: return {1, 4};
    case Format::kF16: case Format::kBF16: return {1, 2};
    case Format::kQ4_0: return {32, 18};
    case Format::kQ4_1: return {32, 20};
    case Format::kQ5_0: return {32, 22};
    case Format::kQ5_1: return {32, 24};
    case Format::kQ8_0: return {32, 34};
    case Format::kQ2_K: return {256, 84};
    case Format::kQ3_K: return {256, 110};
    case Format::kQ4_K: return {256, 144};
    case Format::kQ5_K: return {256, 176};
    case Format::kQ6_K: return {256, 210};
    case Format::kGrid4x32: return {32, 19};
    case Format::kGrid4x64: return {64, 35};
    case Format::kGrid4x128: return {128, 67};
    case Format::kGrid8x32: return {32, 35};
    case Format::kGrid8x128: return {128, 131};
  }
  return {0, 0};
}

constexpr bool is_dense(Format format) { return format_info(format).unit == 1; }

struct PackedWeight {
  Format format;
  int64_t n, k;
  const uint8_t* data;
  const float* bias;  // [n] or null

  int64_t tiles() const { return (n + kTileRows - 1) / kTileRows; }
  int64_t tile_bytes() const {
    FormatInfo info = format_info(format);
    return k / info.unit * info.bytes * kTileRows;
  }
  const uint8_t* tile(int64_t index) const { return data + index * tile_bytes(); }
};

// Rows of the file, [n][row bytes], tile by tile into dst.
void pack_tile(Format format, const uint8_t* rows, int64_t n, int64_t k, int64_t tile, uint8_t* dst);

}  // namespace edgellm
