// Packing of weights, quantization of activations, and the linears.
#pragma once
#include "api.h"

// Rows of a file [n][row bytes] -> tiles. `format` is ggml's type id; dst holds dst_bytes, which must be at least
// ceil(n / 8) * 8 * row bytes.
EDGELLM_API int edgellm_pack(void* pool, int32_t format, const void* rows, int64_t n, int64_t k, void* dst, int64_t dst_bytes);
// x f32 [rows][k] -> blocks [rows][k / 32] of 80 bytes; k a multiple of 32.
EDGELLM_API int edgellm_quantize(void* pool, const float* x, int64_t rows, int64_t k, void* blocks);
// out[r][c] = sum over k of x[r][k] * weight[c][k], + bias[c], + add[r][c]. `blocks` null: f32 products of `x`.
// out and add have `stride` floats from row to row; bias and add may be null, add may be out.
EDGELLM_API int edgellm_linear(void* pool, int32_t format, const void* weight, int64_t n, int64_t k, const float* bias, const float* x, const void* blocks, int64_t rows, float* out, int64_t stride, const float* add);
// Rows ids[i] of a packed weight as f32 [count][k], times scale. An id outside 0 .. n - 1 is a bad argument.
EDGELLM_API int edgellm_decode_rows(void* pool, int32_t format, const void* weight, int64_t n, int64_t k, const int64_t* ids, int64_t count, float scale, float* out);
// gate_up f32 [rows][2 n], gate and up beside each other -> out [rows][n] = activation(gate) * up, and, unless null,
// its blocks as of edgellm_quantize. activation: 0 silu, 1 gelu with tanh.
EDGELLM_API int edgellm_gate(void* pool, int32_t activation, const float* gate_up, int64_t rows, int64_t n, float* out, void* blocks);
