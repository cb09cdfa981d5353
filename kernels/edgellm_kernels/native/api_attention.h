// What works on rows and on KV pages. The structs are those of kv_pages.h, attention.h and rows.h.
#pragma once
#include "api.h"

// Sizes of KVPages, GroupTables, BatchRows, AttentionCall and RopeStoreCall: the caller compares them with its own.
EDGELLM_API int edgellm_attention_struct_sizes(int64_t* sizes);
// sum = residual + x (or normed x, where post_gain is given), out = rms_norm(sum) * gain; [rows, n] each. x null:
// nothing is added.
EDGELLM_API int edgellm_add_rms_norm(void* pool, const float* x, const float* residual, const float* gain, const float* post_gain, float eps, int64_t rows, int64_t n, float* sum, float* out);
// cos and sin [tokens, pairs]; frequencies [pairs], or [tokens, pairs] where per_token is not 0.
EDGELLM_API int edgellm_rope_angles(const int64_t* positions, const float* frequencies, int32_t per_token, int64_t tokens, int64_t pairs, float factor, float* cos, float* sin);
// call: a RopeStoreCall.
EDGELLM_API int edgellm_qk_norm_rope_store(void* pool, const void* call);
// call: an AttentionCall.
EDGELLM_API int edgellm_paged_attention(void* pool, const void* call);
// out = e^x (which 0), tanh (1), silu (2), gelu_tanh (3) of n floats, for tests of their error.
EDGELLM_API int edgellm_apply(int32_t which, const float* x, int64_t n, float* out);
