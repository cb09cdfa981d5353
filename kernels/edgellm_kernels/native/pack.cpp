// Rows of a file into tiles: reads the codes and scales of every block, writes planes and headers (see packed.h).
#include <cstring>

#include "formats.h"
#include "packed.h"

namespace edgellm {
namespace {

// --- one block of a file -> its codes, in order ---

void low_then_high_nibbles(const uint8_t* bytes, int count, int span, uint8_t* codes) {
  for (int start = 0; start < count; start += span, codes += 2 * span) {
    for (int j = 0; j < span; ++j) {
      codes[j] = bytes[start + j] & 15;
      codes[span + j] = bytes[start + j] >> 4;
    }
  }
}

// Of every 32 bytes field 0 of each, then field 1 ...: `width` bits, or-ed in at `shift`.
void or_bit_fields(const uint8_t* bytes, int count, int width, int shift, uint8_t* codes) {
  for (int start = 0; start < count; start += 32) {
    for (int field = 0; field < 8 / width; ++field, codes += 32) {
      for (int j = 0; j < 32; ++j)
        codes[j] |= static_cast<uint8_t>(((bytes[start + j] >> (field * width)) & ((1 << width) - 1)) << shift);
    }
  }
}

void or_fifth_bits(const uint8_t* bytes, uint8_t* codes) {
  for (int j = 0; j < 32; ++j) codes[j] |= static_cast<uint8_t>(((bytes[j / 8] >> (j % 8)) & 1) << 4);
}

void read_codes(Format format, const uint8_t* block, uint8_t* codes) {
  switch (format) {
    case Format::kQ4_0: return low_then_high_nibbles(block + 2, 16, 16, codes);
    case Format::kQ4_1: return low_then_high_nibbles(block + 4, 16, 16, codes);
    case Format::kQ5_0:
      low_then_high_nibbles(block + 6, 16, 16, codes);
      return or_fifth_bits(block + 2, codes);
    case Format::kQ5_1:
      low_then_high_nibbles(block + 8, 16, 16, codes);
      return or_fifth_bits(block + 4, codes);
    case Format::kQ8_0: std::memcpy(codes, block + 2, 32); return;
    case Format::kGrid4x32: case Format::kGrid4x64: case Format::kGrid4x128:
      for (int j = 0; j < format_info(format).unit; ++j) codes[j] = (block[3 + j / 2] >> (j % 2 * 4)) & 15;
      return;
    case Format::kGrid8x32: case Format::kGrid8x128:
      for (int j = 0; j < format_info(format).unit; ++j) codes[j] = block[3 + j] ^ 0x80;
      return;
    case Format::kQ4_K: return low_then_high_nibbles(block + 16, 128, 32, codes);
    case Format::kQ5_K:
      low_then_high_nibbles(block + 48, 128, 32, codes);
      return or_bit_fields(block + 16, 32, 1, 4, codes);
    case Format::kQ6_K:
      low_then_high_nibbles(block, 128, 64, codes);
      return or_bit_fields(block + 128, 64, 2, 4, codes);
    case Format::kQ3_K:
      std::memset(codes, 0, 256);
      or_bit_fields(block + 32, 64, 2, 0, codes);
      return or_bit_fields(block, 32, 1, 2, codes);
    case Format::kQ2_K:
      std::memset(codes, 0, 256);
      return or_bit_fields(block + 16, 64, 2, 0, codes);
    default: return;
  }
}

// --- scales of one row's block into the header of its unit ---

void put_half(uint8_t* header, int index, int row, const uint8_t* half) {
  std::memcpy(header + 16 * index + 2 * row, half, 2);
}

void put_fields(uint8_t* words, int row, const uint8_t* fields) {
  uint32_t word[3] = {0, 0, 0};
  for (int f = 0; f < 15; ++f) word[f / 5] |= static_cast<uint32_t>(fields[f]) << (6 * (f % 5));
  for (int i = 0; i < 3; ++i) {
    word[i] |= static_cast<uint32_t>((fields[15] >> (2 * i)) & 3) << 30;
    std::memcpy(words + 32 * i + 4 * row, &word[i], 4);
  }
}

void write_header(Format format, const uint8_t* block, int row, uint8_t* header) {
  uint8_t fields[16];
  switch (format) {
    case Format::kQ4_1: case Format::kQ5_1:
      put_half(header, 1, row, block + 2);
      [[fallthrough]];
    case Format::kQ4_0: case Format::kQ5_0: case Format::kQ8_0: put_half(header, 0, row, block); return;
    case Format::kGrid4x32: case Format::kGrid4x64: case Format::kGrid4x128: case Format::kGrid8x32:
    case Format::kGrid8x128:
      put_half(header, 0, row, block);
      header[16 + row] = block[2];
      return;
    case Format::kQ4_K: case Format::kQ5_K:
      put_half(header, 0, row, block);
      put_half(header, 1, row, block + 2);
      for (int j = 0; j < 4; ++j) {
        uint8_t first = block[4 + j], second = block[8 + j], third = block[12 + j];
        fields[j] = first & 63;
        fields[4 + j] = static_cast<uint8_t>((third & 15) | ((first >> 2) & 0x30));
        fields[8 + j] = second & 63;
        fields[12 + j] = static_cast<uint8_t>((third >> 4) | ((second >> 2) & 0x30));
      }
      return put_fields(header + 32, row, fields);
    case Format::kQ6_K:
      put_half(header, 0, row, block + 208);
      for (int s = 0; s < 16; ++s) header[16 + 8 * s + row] = block[192 + s];
      return;
    case Format::kQ3_K:
      put_half(header, 0, row, block + 108);
      for (int s = 0; s < 16; ++s) {
        int low = s < 8 ? block[96 + s] & 15 : block[96 + s - 8] >> 4;
        int high = (block[104 + s % 4] >> (2 * (s / 4))) & 3;
        fields[s] = static_cast<uint8_t>(low | (high << 4));
      }
      return put_fields(header + 16, row, fields);
    case Format::kQ2_K:
      put_half(header, 0, row, block + 80);
      put_half(header, 1, row, block + 82);
      for (int s = 0; s < 16; ++s) header[32 + 8 * s + row] = block[s];
      return;
    default: return;
  }
}

// --- the codes of 32 weights of one row into the planes ---

// `width` bits of every code from `shift` on: 32 weights fill 32 * width / 32 words of this row's lane.
void write_plane(const uint8_t* codes, int width, int shift, int row, uint8_t* plane) {
  const int per_half = 16 / width;  // codes in one half of a lane
  for (int vector = 0; vector < width; ++vector) {
    uint32_t word = 0;
    for (int i = 0; i < per_half; ++i) {
      const uint8_t* pair = codes + 2 * (vector * per_half + i);
      uint32_t even = (pair[0] >> shift) & ((1u << width) - 1), odd = (pair[1] >> shift) & ((1u << width) - 1);
      word |= (even | odd << 16) << (width * i);
    }
    std::memcpy(plane + 32 * vector + 4 * row, &word, 4);
  }
}

template <int BITS> void write_codes(const uint8_t* codes, int row, uint8_t* out) {
  if constexpr (BITS == 8) {
    for (int p = 0; p < 16; ++p) std::memcpy(out + 16 * p + 2 * row, codes + 2 * p, 2);
  } else if constexpr (BITS >= 4) {
    write_plane(codes, 4, 0, row, out);
    if constexpr (BITS > 4) write_plane(codes, BITS - 4, 4, row, out + 128);
  } else {
    write_plane(codes, 2, 0, row, out);
    if constexpr (BITS == 3) write_plane(codes, 1, 2, row, out + 64);
  }
}

}  // namespace

void pack_tile(Format format, const uint8_t* rows, int64_t n, int64_t k, int64_t tile, uint8_t* dst) {
  const FormatInfo info = format_info(format);
  const int64_t row_bytes = k / info.unit * info.bytes, tile_bytes = row_bytes * kTileRows;
  std::memset(dst, 0, static_cast<size_t>(tile_bytes));
  for (int row = 0; row < kTileRows; ++row) {
    const int64_t index = tile * kTileRows + row;
    if (index >= n) break;
    const uint8_t* source = rows + index * row_bytes;
    bool block_format = visit_format(format, [&](auto type) {
      using T = decltype(type);
      static_assert(kUnitBytes<T> % kTileRows == 0);
      uint8_t codes[T::kUnit];
      uint8_t* unit = dst;
      for (int64_t u = 0; u < k / T::kUnit; ++u, source += info.bytes, unit += kUnitBytes<T>) {
        read_codes(format, source, codes);
        write_header(format, source, row, unit);
        for (int s = 0; s < T::kUnit / 32; ++s)
          write_codes<T::kBits>(codes + 32 * s, row, unit + T::kHeader + s * kCodeBytes<T::kBits>);
      }
    });
    if (!block_format) {
      for (int64_t i = 0; i < k; ++i)
        std::memcpy(dst + (i * kTileRows + row) * info.bytes, source + i * info.bytes, static_cast<size_t>(info.bytes));
    }
  }
}

}  // namespace edgellm
