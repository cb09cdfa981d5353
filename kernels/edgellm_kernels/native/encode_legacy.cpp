// Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: blocks of 32 with f16 scales. Codes are joined into words while they are still in
// lanes, so that a block is a few stores.
#include <cstring>

#include "encode_run.h"

namespace edgellm::encode {
namespace {

using Q4_0 = Grid<1, 32, false, -8, 7, 0, 0>;
using Q4_1 = Grid<1, 32, true, 0, 15, 0, 0>;
using Q5_0 = Grid<1, 32, false, -16, 15, 0, 0>;
using Q5_1 = Grid<1, 32, true, 0, 31, 0, 0>;
using Q8_0 = Grid<1, 32, false, -127, 127, 0, 0>;

// The words of eight blocks: word[j] of block b goes to out + b * block_bytes + offset + 4 j.
void store_words(const I32* words, int num_words, int count, uint8_t* out, int block_bytes, int offset) {
  alignas(32) int32_t lanes[8][kLanes];
  for (int j = 0; j < num_words; ++j) store_i32(lanes[j], words[j]);
  for (int b = 0; b < count; ++b)
    for (int j = 0; j < num_words; ++j) std::memcpy(out + b * block_bytes + offset + 4 * j, &lanes[j][b], 4);
}

void store_halves(F32 values, int count, uint8_t* out, int block_bytes, int offset) {
  uint16_t bits[kLanes];
  store_f16(bits, values);
  for (int b = 0; b < count; ++b) std::memcpy(out + b * block_bytes + offset, &bits[b], 2);
}

// bytes: d, (m), (32 fifth bits), 16 bytes of which byte j holds elements j and j + 16
template <class G, int kZero, bool kFifthBit> void legacy(const Rows& rows, const Plan& plan) {
  constexpr int kHead = G::kOffset ? 4 : 2, kHigh = kFifthBit ? 4 : 0, kBytes = kHead + kHigh + 16;
  run<G>(rows, plan, kBytes, [](const auto& found, int count, uint8_t* out) {
    const F32 inverse_scale = inverse(found.choice.d), offset = found.choice.dmin;
    I32 words[4], high = splat_i32(0);
    for (int j = 0; j < 4; ++j) {
      words[j] = splat_i32(0);
      for (int i = 0; i < 4; ++i) {
        const int e = 4 * j + i;
        I32 first = found.template code<kZero>(0, e, inverse_scale, offset);
        I32 second = found.template code<kZero>(0, e + 16, inverse_scale, offset);
        if constexpr (kFifthBit) {
          high = high | shift_left(shift_right(first, 4), e) | shift_left(shift_right(second, 4), e + 16);
          first = first & splat_i32(15);
          second = second & splat_i32(15);
        }
        words[j] = words[j] | shift_left(first | shift_left(second, 4), 8 * i);
      }
    }
    store_halves(found.choice.d, count, out, kBytes, 0);
    if constexpr (G::kOffset) store_halves(found.choice.dmin, count, out, kBytes, 2);
    if constexpr (kFifthBit) store_words(&high, 1, count, out, kBytes, kHead);
    store_words(words, 4, count, out, kBytes, kHead + kHigh);
  });
}

void q8_0(const Rows& rows, const Plan& plan) {
  run<Q8_0>(rows, plan, 34, [](const auto& found, int count, uint8_t* out) {
    const F32 inverse_scale = inverse(found.choice.d);
    I32 words[8];
    for (int j = 0; j < 8; ++j) {
      words[j] = splat_i32(0);
      for (int i = 0; i < 4; ++i) {
        I32 code = found.template code<0>(0, 4 * j + i, inverse_scale, zero());
        words[j] = words[j] | shift_left(code & splat_i32(255), 8 * i);
      }
    }
    store_halves(found.choice.d, count, out, 34, 0);
    store_words(words, 8, count, out, 34, 2);
  });
}

}  // namespace

bool encode_legacy(int64_t type, const Rows& rows, const Plan& plan) {
  switch (type) {
    case 2: legacy<Q4_0, 8, false>(rows, plan); return true;
    case 3: legacy<Q4_1, 0, false>(rows, plan); return true;
    case 6: legacy<Q5_0, 16, true>(rows, plan); return true;
    case 7: legacy<Q5_1, 0, true>(rows, plan); return true;
    case 8: q8_0(rows, plan); return true;
    default: return false;
  }
}

}  // namespace edgellm::encode
