// Walks the blocks of a tensor eight at a time: loads, searches, and hands the result to a packer.
#pragma once

#include <algorithm>

#include "encode_search.h"

namespace edgellm::encode {

struct Rows {
  const float* values;      // [num_rows, width]
  const float* importance;  // null, or [width] or [num_rows, width]
  int64_t importance_stride;
  int64_t num_rows, width;
  uint8_t* out;
};

constexpr float kLargest = 268435456.0f;  // 2^28: block_search.LARGEST

// Codes, scales and minima of eight blocks, found and on their way into the file.
template <class G, bool kWeighted> struct Found {
  const Search<G, kWeighted>& search;
  const Choice<G>& choice;

  // Unsigned codes of element e: counted from zero upward.
  template <int kZero> I32 code(int s, int e, F32 inverse_scale, F32 offset) const {
    return round_i32(search.code(s, e, inverse_scale, offset)) + splat_i32(kZero);
  }
};

// pack(found, count, out): writes `count` blocks (at most eight) one after the other.
template <class G, bool kWeighted, class Pack>
void run_weighted(const Rows& rows, const Plan& plan, int64_t block_bytes, Pack&& pack) {
  const int64_t per_row = rows.width / G::kElements, blocks = rows.num_rows * per_row;
  alignas(32) F32 x[G::kElements], w[kWeighted ? G::kElements : 8];
  for (int64_t first = 0; first < blocks; first += kLanes) {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, blocks - first));
    const float* from[kLanes];
    const float* weights[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      // Lanes without a block repeat the last one.
      const int64_t block = first + std::min(lane, count - 1);
      from[lane] = rows.values + block * G::kElements;
      if (kWeighted && rows.importance != nullptr) {
        const int64_t row = block / per_row;
        weights[lane] = rows.importance + row * rows.importance_stride + (block - row * per_row) * G::kElements;
      }
    }
    for (int e = 0; e < G::kElements; e += 8) {
      transpose(from, x + e);
      for (int i = e; i < e + 8; ++i) x[i] = max(min(x[i], splat(kLargest)), splat(-kLargest));
      for (int lane = 0; lane < kLanes; ++lane) from[lane] += 8;
      if constexpr (kWeighted) {
        if (rows.importance == nullptr) {
          for (int i = e; i < e + 8; ++i) w[i] = splat(1.0f);
        } else {
          transpose(weights, w + e);
          for (int lane = 0; lane < kLanes; ++lane) weights[lane] += 8;
        }
      }
    }
    Search<G, kWeighted> search(x, w, plan);
    const Choice<G> choice = search.run();
    pack(Found<G, kWeighted>{search, choice}, count, rows.out + first * block_bytes);
  }
}

template <class G, class Pack> void run(const Rows& rows, const Plan& plan, int64_t block_bytes, Pack&& pack) {
#ifdef EDGELLM_AVX2
  if (rows.importance == nullptr) return run_weighted<G, false>(rows, plan, block_bytes, pack);
#endif
  // Without vectors of this width the compiler takes minutes: there a weight of 1, which changes no bit, will do.
  run_weighted<G, true>(rows, plan, block_bytes, pack);
}

// Type ids of ggml.h. False if the type is not one of these.
bool encode_legacy(int64_t type, const Rows& rows, const Plan& plan);
bool encode_two_level(int64_t type, const Rows& rows, const Plan& plan);
int64_t block_elements(int64_t type);  // 0 if the type is not encoded

}  // namespace edgellm::encode
