#include "api_linear.h"

#include "activations.h"
#include "gate.h"
#include "linear.h"
#include "packed.h"
#include "thread_pool.h"

using namespace edgellm;

namespace {

bool is_weight(int32_t format, int64_t n, int64_t k) {
  const FormatInfo info = format_info(static_cast<Format>(format));
  return info.unit > 0 && n > 0 && k > 0 && k % info.unit == 0;
}

PackedWeight packed(int32_t format, const void* data, int64_t n, int64_t k, const float* bias) {
  return {static_cast<Format>(format), n, k, static_cast<const uint8_t*>(data), bias};
}

}  // namespace

int edgellm_pack(void* pool, int32_t format, const void* rows, int64_t n, int64_t k, void* dst, int64_t dst_bytes) {
  if (!is_weight(format, n, k)) return kBadArgument;
  const PackedWeight weight = packed(format, dst, n, k, nullptr);
  if (dst_bytes < weight.tiles() * weight.tile_bytes()) return kBadArgument;
  return guarded([&] {
    static_cast<Pool*>(pool)->parallel_for(weight.tiles(), [&](int64_t tile) {
      pack_tile(weight.format, static_cast<const uint8_t*>(rows), n, k, tile, static_cast<uint8_t*>(dst) + tile * weight.tile_bytes());
    });
    return kOk;
  });
}

int edgellm_quantize(void* pool, const float* x, int64_t rows, int64_t k, void* blocks) {
  if (rows < 0 || k <= 0 || k % kActivationBlock != 0) return kBadArgument;
  return guarded([&] {
    static_cast<Pool*>(pool)->parallel_for(rows, [&](int64_t row) {
      quantize_row(x + row * k, k, static_cast<ActivationBlock*>(blocks) + row * (k / kActivationBlock));
    });
    return kOk;
  });
}

int edgellm_linear(void* pool, int32_t format, const void* data, int64_t n, int64_t k, const float* bias, const float* x, const void* blocks, int64_t rows, float* out, int64_t stride, const float* add) {
  if (!is_weight(format, n, k) || rows < 0 || stride < n) return kBadArgument;
  const PackedWeight weight = packed(format, data, n, k, bias);
  const LinearInput input{x, static_cast<const ActivationBlock*>(blocks), rows};
  const LinearOutput output{out, stride, add};
  if (rows == 0) return kOk;
  if (x == nullptr && (blocks == nullptr || !has_integer_kernel(weight.format))) return kBadArgument;
  return guarded([&] {
    static_cast<Pool*>(pool)->parallel_for(linear_tasks(weight, rows), [&](int64_t task) { linear_task(weight, input, output, task); });
    return kOk;
  });
}

int edgellm_decode_rows(void* pool, int32_t format, const void* data, int64_t n, int64_t k, const int64_t* ids, int64_t count, float scale, float* out) {
  if (!is_weight(format, n, k) || count < 0) return kBadArgument;
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= n) return kBadArgument;
  const PackedWeight weight = packed(format, data, n, k, nullptr);
  return guarded([&] {
    static_cast<Pool*>(pool)->parallel_for(count, [&](int64_t i) { decode_row(weight, ids[i], scale, out + i * k); });
    return kOk;
  });
}

int edgellm_gate(void* pool, int32_t activation, const float* gate_up, int64_t rows, int64_t n, float* out, void* blocks) {
  if (rows < 0 || n <= 0 || activation < 0 || activation > 1) return kBadArgument;
  if (blocks != nullptr && n % kActivationBlock != 0) return kBadArgument;
  return guarded([&] {
    static_cast<Pool*>(pool)->parallel_for(rows, [&](int64_t row) {
      const float* gate = gate_up + row * 2 * n;
      gate_row(static_cast<Activation>(activation), gate, gate + n, n, out + row * n);
      if (blocks != nullptr)
        quantize_row(out + row * n, n, static_cast<ActivationBlock*>(blocks) + row * (n / kActivationBlock));
    });
    return kOk;
  });
}
