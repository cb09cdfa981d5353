#include "gate.h"

#include <cstring>

#include "vector_math.h"

namespace edgellm {

using namespace simd;

namespace {

template <class F> void map_row(F&& function, const float* gate, const float* up, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, function(load(gate + i)) * load(up + i));
  if (i == n) return;
  float last[3][kLanes] = {};
  const size_t bytes = static_cast<size_t>(n - i) * sizeof(float);
  std::memcpy(last[0], gate + i, bytes);
  std::memcpy(last[1], up + i, bytes);
  store(last[2], function(load(last[0])) * load(last[1]));
  std::memcpy(out + i, last[2], bytes);
}

}  // namespace

void gate_row(Activation activation, const float* gate, const float* up, int64_t n, float* out) {
  if (activation == Activation::kSilu) map_row([](F32 x) { return silu(x); }, gate, up, n, out);
  else map_row([](F32 x) { return gelu_tanh(x); }, gate, up, n, out);
}

}  // namespace edgellm
