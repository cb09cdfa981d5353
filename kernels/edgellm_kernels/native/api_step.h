// The step program: a whole pass of the decoder in one call. The structs are those of step.h.
#pragma once
#include "api.h"

// Sizes of StepLinear, StepLayer, StepRope, StepModel and StepCall: the caller compares them with its own.
EDGELLM_API int edgellm_step_struct_sizes(int64_t* sizes);
// model: a StepModel. Its layers and ropes are copied, what they point at is not. *step is for the functions below.
EDGELLM_API int edgellm_step_new(const void* model, void** step);
EDGELLM_API int edgellm_step_delete(void* step);
// call: a StepCall.
EDGELLM_API int edgellm_step_run(void* pool, void* step, const void* call);
// Ten times since the last call, in seconds: embed, norm, qkv, rope, attention, attn_output, gate_up, gate, down, head.
EDGELLM_API int edgellm_step_seconds(void* step, double* seconds);
// Of every row of x [rows, n] the largest value and its first place; NaN and its place where there is one.
EDGELLM_API int edgellm_largest(void* pool, const float* x, int64_t rows, int64_t n, float* values, int64_t* places);
