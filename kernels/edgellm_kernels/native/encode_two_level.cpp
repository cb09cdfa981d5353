// Q2_K to Q6_K: blocks of 256 with integer scales under f16 super-scales. The search leaves codes in lanes; they are
// laid down block by block and packed there (byte maps: weights.BlockLayout).
#include <cstring>

#include "encode_run.h"

namespace edgellm::encode {
namespace {

using Q2_K = Grid<16, 16, true, 0, 3, 0, 15>;
using Q3_K = Grid<16, 16, false, -4, 3, -32, 31>;
using Q4_K = Grid<8, 32, true, 0, 15, 0, 63>;
using Q5_K = Grid<8, 32, true, 0, 31, 0, 63>;
using Q6_K = Grid<16, 16, false, -32, 31, -128, 127>;

// One block, out of its lane.
struct Block {
  uint8_t codes[256];
  int32_t scales[16], minima[16];
  uint16_t d, dmin;
};

// byte l of every kSpan bytes: field 0 of value l, field 1 of value l + kSpan ...
template <int kSpan, int kWidth> void join(const uint8_t* values, int num_values, int shift, int mask, uint8_t* out) {
  constexpr int kFields = 8 / kWidth;
  for (int base = 0; base < num_values; base += kFields * kSpan, values += kFields * kSpan, out += kSpan)
    for (int l = 0; l < kSpan; ++l) {
      int byte = 0;
      for (int f = 0; f < kFields; ++f) byte |= ((values[f * kSpan + l] >> shift) & mask) << (f * kWidth);
      out[l] = static_cast<uint8_t>(byte);
    }
}

void six_bits(const int32_t* scales, const int32_t* minima, uint8_t* out) {
  for (int j = 0; j < 4; ++j) {
    out[j] = static_cast<uint8_t>(scales[j] | ((scales[j + 4] >> 4) << 6));
    out[j + 4] = static_cast<uint8_t>(minima[j] | ((minima[j + 4] >> 4) << 6));
    out[j + 8] = static_cast<uint8_t>((scales[j + 4] & 15) | ((minima[j + 4] & 15) << 4));
  }
}

void pack_q2_k(const Block& b, uint8_t* out) {
  for (int s = 0; s < 16; ++s) out[s] = static_cast<uint8_t>(b.scales[s] | (b.minima[s] << 4));
  join<32, 2>(b.codes, 256, 0, 3, out + 16);
  std::memcpy(out + 80, &b.d, 2);
  std::memcpy(out + 82, &b.dmin, 2);
}

void pack_q3_k(const Block& b, uint8_t* out) {
  join<32, 1>(b.codes, 256, 2, 1, out);
  join<32, 2>(b.codes, 256, 0, 3, out + 32);
  uint8_t stored[16];
  for (int s = 0; s < 16; ++s) stored[s] = static_cast<uint8_t>(b.scales[s] + 32);
  join<8, 4>(stored, 16, 0, 15, out + 96);
  join<4, 2>(stored, 16, 4, 3, out + 104);
  std::memcpy(out + 108, &b.d, 2);
}

void pack_q4_k(const Block& b, uint8_t* out) {
  std::memcpy(out, &b.d, 2);
  std::memcpy(out + 2, &b.dmin, 2);
  six_bits(b.scales, b.minima, out + 4);
  join<32, 4>(b.codes, 256, 0, 15, out + 16);
}

void pack_q5_k(const Block& b, uint8_t* out) {
  std::memcpy(out, &b.d, 2);
  std::memcpy(out + 2, &b.dmin, 2);
  six_bits(b.scales, b.minima, out + 4);
  join<32, 1>(b.codes, 256, 4, 1, out + 16);
  join<32, 4>(b.codes, 256, 0, 15, out + 48);
}

void pack_q6_k(const Block& b, uint8_t* out) {
  join<64, 4>(b.codes, 256, 0, 15, out);
  join<32, 2>(b.codes, 256, 4, 3, out + 128);
  for (int s = 0; s < 16; ++s) out[192 + s] = static_cast<uint8_t>(b.scales[s]);
  std::memcpy(out + 208, &b.d, 2);
}

template <class G, int kZero, int kBytes>
void two_level(const Rows& rows, const Plan& plan, void (*pack)(const Block&, uint8_t*)) {
  run<G>(rows, plan, kBytes, [pack](const auto& found, int count, uint8_t* out) {
    Block blocks[kLanes];
    alignas(32) int32_t lanes[kLanes];
    auto spread = [&](I32 values, auto&& put) {
      store_i32(lanes, values);
      for (int b = 0; b < kLanes; ++b) put(blocks[b], lanes[b]);
    };
    uint16_t d[kLanes], dmin[kLanes];
    store_f16(d, found.choice.d);
    store_f16(dmin, found.choice.dmin);
    for (int b = 0; b < kLanes; ++b) {
      blocks[b].d = d[b];
      blocks[b].dmin = dmin[b];
    }
    for (int s = 0; s < G::kSub; ++s) {
      spread(round_i32(found.choice.scales[s]), [s](Block& b, int32_t v) { b.scales[s] = v; });
      spread(round_i32(found.choice.minima[s]), [s](Block& b, int32_t v) { b.minima[s] = v; });
      const F32 inverse_scale = inverse(found.choice.sub_scale(s)), offset = found.choice.sub_offset(s);
      for (int e = 0; e < G::kLen; ++e) {
        const int i = s * G::kLen + e;
        spread(found.template code<kZero>(s, e, inverse_scale, offset),
               [i](Block& b, int32_t v) { b.codes[i] = static_cast<uint8_t>(v); });
      }
    }
    for (int b = 0; b < count; ++b) pack(blocks[b], out + b * kBytes);
  });
}

}  // namespace

bool encode_two_level(int64_t type, const Rows& rows, const Plan& plan) {
  switch (type) {
    case 10: two_level<Q2_K, 0, 84>(rows, plan, pack_q2_k); return true;
    case 11: two_level<Q3_K, 4, 110>(rows, plan, pack_q3_k); return true;
    case 12: two_level<Q4_K, 0, 144>(rows, plan, pack_q4_k); return true;
    case 13: two_level<Q5_K, 0, 176>(rows, plan, pack_q5_k); return true;
    case 14: two_level<Q6_K, 32, 210>(rows, plan, pack_q6_k); return true;
    default: return false;
  }
}

}  // namespace edgellm::encode
