#include "api_attention.h"

#include <algorithm>

#include "attention.h"
#include "rows.h"
#include "thread_pool.h"
#include "vector_math.h"

using namespace edgellm;

namespace {

Pool& pool_of(void* pool) { return *static_cast<Pool*>(pool); }

// Rows that one task takes: less would cost more to deal out than to compute.
constexpr int64_t kRowsPerTask = 8;

template <class F> void by_row(Pool& pool, int64_t rows, F&& body) {
  pool.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t row = task * kRowsPerTask; row < std::min(rows, (task + 1) * kRowsPerTask); ++row) body(row);
  });
}

}  // namespace

int edgellm_attention_struct_sizes(int64_t* sizes) {
  sizes[0] = sizeof(KVPages);
  sizes[1] = sizeof(GroupTables);
  sizes[2] = sizeof(BatchRows);
  sizes[3] = sizeof(AttentionCall);
  sizes[4] = sizeof(RopeStoreCall);
  return kOk;
}

int edgellm_add_rms_norm(
    void* pool, const float* x, const float* residual, const float* gain, const float* post_gain, float eps,
    int64_t rows, int64_t n, float* sum, float* out) {
  return guarded([&] {
    by_row(pool_of(pool), rows, [&](int64_t row) {
      const int64_t start = row * n;
      add_rms_norm(
          x == nullptr ? nullptr : x + start, residual + start, gain, post_gain, eps, n, sum + start, out + start);
    });
    return kOk;
  });
}

int edgellm_rope_angles(
    const int64_t* positions, const float* frequencies, int32_t per_token, int64_t tokens, int64_t pairs, float factor,
    float* cos, float* sin) {
  for (int64_t t = 0; t < tokens; ++t) {
    const float* own = per_token ? frequencies + t * pairs : frequencies;
    rope_angles(positions[t], own, pairs, factor, cos + t * pairs, sin + t * pairs);
  }
  return kOk;
}

int edgellm_qk_norm_rope_store(void* pool, const void* call) {
  const auto& rope = *static_cast<const RopeStoreCall*>(call);
  const int64_t slots = rope.pages.blocks * rope.pages.block_size;
  if (rope.pages.kv_heads < 1 || rope.heads % rope.pages.kv_heads != 0) return kBadArgument;
  if (rope.pairs < 0 || 2 * rope.pairs > rope.pages.k_dim) return kBadArgument;
  for (int64_t t = 0; t < rope.tokens; ++t) {
    if (rope.slots[t] >= slots) return kBadArgument;
  }
  return guarded([&] {
    by_row(pool_of(pool), rope.tokens, [&](int64_t token) { qk_norm_rope_store(rope, token); });
    return kOk;
  });
}

int edgellm_paged_attention(void* pool, const void* call) {
  const auto& attention = *static_cast<const AttentionCall*>(call);
  if (!tables_fit(attention.pages, attention.tables, attention.rows)) return kBadArgument;
  if (attention.heads < 1 || attention.heads % attention.pages.kv_heads != 0) return kBadArgument;
  return guarded([&] {
    paged_attention(pool_of(pool), attention);
    return kOk;
  });
}

int edgellm_apply(int32_t which, const float* x, int64_t n, float* out) {
  if (which < 0 || which > 3) return kBadArgument;
  for (int64_t i = 0; i < n; i += simd::kLanes) {
    const int64_t count = std::min<int64_t>(simd::kLanes, n - i);
    float lanes[simd::kLanes] = {};
    std::copy(x + i, x + i + count, lanes);
    const simd::F32 value = simd::load(lanes);
    simd::store(lanes, which == 0 ? exp(value) : which == 1 ? tanh(value) : which == 2 ? silu(value) : gelu_tanh(value));
    std::copy(lanes, lanes + count, out + i);
  }
  return kOk;
}
