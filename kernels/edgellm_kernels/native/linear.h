// Products of packed weights with rows of activations, in tasks that any thread may run.
//
// Every output element has one order of operations, whatever the number of rows and tasks: along K, block by block,
// one fused multiply-add per scale (integers, exact within a block) or one per weight (f32). So a row has the same
// bits alone, in a batch and in a prefill chunk.
#pragma once

#include <cstdint>

#include "activations.h"
#include "packed.h"
#include "simd.h"

namespace edgellm {

struct LinearInput {
  const float* values;               // [rows][k]
  const ActivationBlock* quantized;  // [rows][k / 32], or null: f32 products ("exact")
  int64_t rows;
};

struct LinearOutput {
  float* data;
  int64_t stride;    // floats from one row to the next
  const float* add;  // added after the bias, same stride; may be null or equal to data
};

// Whether the integer kernels serve the format: every block format; dense weights take f32 products.
inline bool has_integer_kernel(Format format) { return !is_dense(format); }

// Number of independent tasks of a product, and one of them: each writes columns of its own.
int64_t linear_tasks(const PackedWeight& weight, int64_t rows);
void linear_task(const PackedWeight& weight, const LinearInput& input, const LinearOutput& output, int64_t task);

// One row of the weight as f32 [k], with the bits of the reference decoder, times scale (1 leaves them as they are).
void decode_row(const PackedWeight& weight, int64_t row, float scale, float* out);

// --- what the two kinds of kernels offer to linear.cpp: sums over all of k, [rows][tiles * 8] with stride ---

// A few rows of activations, one or two tiles: codes stay in registers.
void integer_rows(const PackedWeight& weight, int64_t tile, int tiles, const ActivationBlock* x, int64_t rows, float* sums);
// Many rows of activations, at most kPanelRows, and one or two tiles: codes are unpacked once into the cache.
void integer_panel(const PackedWeight& weight, int64_t tile, int tiles, const ActivationBlock* x, int64_t rows, float* sums);
void exact_panel(const PackedWeight& weight, int64_t tile, int tiles, const float* x, int64_t rows, float* sums);

// Measured with AVX2 and with twice its registers: up to here unpacking again is cheaper than a detour through the cache.
constexpr int64_t kFewRows = simd::kManyRegisters ? 24 : 8;
constexpr int64_t kPanelRows = 64;
constexpr int kPanelTiles = 2;
constexpr int64_t kSumStride = kPanelTiles * kTileRows;

}  // namespace edgellm
