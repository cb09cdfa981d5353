#include "api_encode.h"

#include "encode_run.h"

using namespace edgellm;
using namespace edgellm::encode;

namespace edgellm::encode {

int64_t block_elements(int64_t type) {
  if (type == 2 || type == 3 || (type >= 6 && type <= 8)) return 32;
  return type >= 10 && type <= 14 ? 256 : 0;
}

}  // namespace edgellm::encode

int edgellm_encode_rows(int64_t type, const float* rows, const float* importance, int64_t importance_stride,
                        int64_t num_rows, int64_t width, const float* plan, int64_t plan_length, uint8_t* out) {
  return guarded([&]() -> Status {
    constexpr int kCounts = 7;
    const int64_t elements = block_elements(type);
    if (elements == 0 || width <= 0 || width % elements != 0 || num_rows < 0 || plan_length < kCounts) {
      return kBadArgument;
    }
    if (importance != nullptr && importance_stride != 0 && importance_stride != width) return kBadArgument;
    int counts[kCounts];
    for (int i = 0; i < kCounts; ++i) {
      if (!(plan[i] >= 0.0f && plan[i] <= 1024.0f)) return kBadArgument;
      counts[i] = static_cast<int>(plan[i]);
    }
    Plan search;
    search.num_steps = counts[0];
    search.num_mirrored = counts[1];
    search.descents = counts[2];
    search.num_d = counts[3];
    search.num_dmin = counts[4];
    search.radius = counts[5];
    search.polishes = counts[6];
    const int64_t listed = static_cast<int64_t>(counts[0]) + counts[1] + counts[3] + counts[4];
    if (plan_length != kCounts + listed || counts[3] < 1 || counts[4] < 1) return kBadArgument;
    search.steps = plan + kCounts;
    search.mirrored = search.steps + search.num_steps;
    search.d_factors = search.mirrored + search.num_mirrored;
    search.dmin_factors = search.d_factors + search.num_d;
    const Rows all{rows, importance, importance_stride, num_rows, width, out};
    return encode_legacy(type, all, search) || encode_two_level(type, all, search) ? kOk : kBadArgument;
  });
}
