// Calls the linear functions of the library on odd shapes, every buffer exactly as large as promised, and compares the
// integer products with the f32 products. Built with the address and undefined-behaviour sanitizers by
// test_native_sanitizers.py; exit code 1 where something is wrong.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "api_core.h"
#include "api_linear.h"
#include "packed.h"
#include "random_values.h"
#include "simd.h"

namespace {

// Random bytes, with scales that are small halves. Where they lie differs by format: every half that is one.
std::vector<uint8_t> random_rows(edgellm::Format format, int64_t n, int64_t k) {
  using edgellm::Format;
  const auto info = edgellm::format_info(format);
  std::vector<uint8_t> rows(static_cast<size_t>(n * (k / info.unit) * info.bytes));
  for (auto& byte : rows) byte = static_cast<uint8_t>(next_random());
  std::vector<int64_t> halves;
  switch (format) {
    case Format::kQ4_1: case Format::kQ5_1: case Format::kQ4_K: case Format::kQ5_K: halves = {0, 2}; break;
    case Format::kQ2_K: halves = {80, 82}; break;
    case Format::kQ3_K: halves = {108}; break;
    case Format::kQ6_K: halves = {208}; break;
    case Format::kF32: case Format::kBF16: halves = {}; break;
    default: halves = {0};
  }
  for (size_t block = 0; block < rows.size(); block += static_cast<size_t>(info.bytes)) {
    for (int64_t at : halves) rows[block + static_cast<size_t>(at) + 1] = 0x20 | (next_random() & 0x83);
    if (format == Format::kF32) {
      const float value = next_float();
      std::memcpy(&rows[block], &value, 4);
    }
    if (format == Format::kBF16) rows[block + 1] = 0x3e;
  }
  return rows;
}

bool check(bool truth, const char* what, int format, long long n, long long k, long long rows) {
  if (!truth) std::printf("%s: format %d, n %lld, k %lld, rows %lld\n", what, format, n, k, rows);
  return truth;
}

bool run(void* pool, edgellm::Format format, int64_t n, int64_t k, int64_t rows) {
  const int32_t id = static_cast<int32_t>(format);
  const auto source = random_rows(format, n, k);
  const edgellm::PackedWeight shape{format, n, k, nullptr, nullptr};
  std::vector<uint8_t> packed(static_cast<size_t>(shape.tiles() * shape.tile_bytes()));
  std::vector<float> x(static_cast<size_t>(rows * k)), bias(static_cast<size_t>(n)), add(static_cast<size_t>(rows * n));
  for (auto* values : {&x, &bias, &add})
    for (float& value : *values) value = next_float();
  std::vector<float> exact(add.size()), quick(add.size()), decoded(static_cast<size_t>(2 * k));
  bool ok = check(edgellm_pack(pool, id, source.data(), n, k, packed.data(), static_cast<int64_t>(packed.size())) == 0, "pack", id, n, k, rows);
  ok &= check(edgellm_pack(pool, id, source.data(), n, k, packed.data(), static_cast<int64_t>(packed.size()) - 1) == 1, "pack into too little", id, n, k, rows);
  const int64_t ids[2] = {n - 1, 0}, outside[1] = {n};
  ok &= check(edgellm_decode_rows(pool, id, packed.data(), n, k, ids, 2, 2.0f, decoded.data()) == 0, "decode", id, n, k, rows);
  ok &= check(edgellm_decode_rows(pool, id, packed.data(), n, k, outside, 1, 1.0f, decoded.data()) == 1, "decode outside", id, n, k, rows);
  ok &= check(edgellm_linear(pool, id, packed.data(), n, k, bias.data(), x.data(), nullptr, rows, exact.data(), n, add.data()) == 0, "exact", id, n, k, rows);
  if (k % 32 != 0) return ok;
  // 80 bytes per 32, allocated to the byte.
  std::unique_ptr<uint8_t[]> blocks(new uint8_t[static_cast<size_t>(rows * (k / 32) * 80)]);
  ok &= check(edgellm_quantize(pool, x.data(), rows, k, blocks.get()) == 0, "quantize", id, n, k, rows);
  ok &= check(edgellm_linear(pool, id, packed.data(), n, k, bias.data(), x.data(), blocks.get(), rows, quick.data(), n, add.data()) == 0, "integers", id, n, k, rows);
  float largest = 0, difference = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    largest = std::fmax(largest, std::fabs(exact[i]));
    difference = std::fmax(difference, std::fabs(exact[i] - quick[i]));
  }
  return ok & check(difference <= 1e-3f * largest, "integers differ from f32", id, n, k, rows);
}

}  // namespace

int main() {
  bool ok = true;
  for (int64_t threads : {1, 3}) {
    void* pool = nullptr;
    if (edgellm_pool_new(threads, &pool) != 0) return 1;
    for (int id : {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30, 1001, 1002, 1003, 1004, 1005}) {
      const auto format = static_cast<edgellm::Format>(id);
      const int64_t unit = edgellm::format_info(format).unit;
      for (int64_t n : {1, 8, 21})
        for (int64_t blocks : {1, 3})
          for (int64_t rows : {1, 2, 7, 9, 65}) ok &= run(pool, format, n, unit == 1 ? 31 * blocks + 1 : unit * blocks, rows);
    }
    for (int64_t n : {1, 32, 45}) {
      std::vector<float> both(static_cast<size_t>(2 * 3 * n), 0.5f), out(static_cast<size_t>(3 * n));
      for (int32_t activation : {0, 1}) ok &= edgellm_gate(pool, activation, both.data(), 3, n, out.data(), nullptr) == 0;
      ok &= edgellm_gate(pool, 2, both.data(), 3, n, out.data(), nullptr) == 1;
    }
    if (edgellm_pool_delete(pool) != 0) return 1;
  }
  return ok ? 0 : 1;
}
