// Encoders of the GGUF block types.
#pragma once
#include "api.h"

// rows [num_rows, width] f32 -> out [num_rows, width / elements * bytes] of the block type `type` (its id in ggml.h),
// on the calling thread. importance: null, or one weight per column; importance_stride is 0 where all rows share it,
// else width. plan [plan_length]: counts of steps, mirrored steps, descents, d factors, dmin factors, the radius and
// the number of polishes, then the steps and factors themselves. Values must be finite.
EDGELLM_API int edgellm_encode_rows(int64_t type, const float* rows, const float* importance, int64_t importance_stride,
                                    int64_t num_rows, int64_t width, const float* plan, int64_t plan_length,
                                    uint8_t* out);
