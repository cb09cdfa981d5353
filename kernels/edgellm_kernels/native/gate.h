// The product in the middle of a gated feed-forward layer.
#pragma once

#include <cstdint>

namespace edgellm {

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// out[i] = activation(gate[i]) * up[i]; out may be gate or up.
void gate_row(Activation activation, const float* gate, const float* up, int64_t n, float* out);

}  // namespace edgellm
