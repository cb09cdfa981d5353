// Calls norms, KV writes, attention, the step program and the argmax of the library on odd shapes, every buffer exactly
// as large as promised and pages of NaN where nothing was stored. Attention is compared with sums in double; the step
// program with itself, cut otherwise and with other threads. Built with the address and undefined-behaviour sanitizers
// by test_native_sanitizers.py; exit code 1 where something is wrong.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "api_attention.h"
#include "api_core.h"
#include "api_linear.h"
#include "api_step.h"
#include "attention.h"
#include "kv_lanes.h"
#include "random_values.h"
#include "rows.h"
#include "step.h"

using namespace edgellm;

namespace {

std::vector<float> random_floats(int64_t count) {
  std::vector<float> made(static_cast<size_t>(count));
  for (float& value : made) value = next_float();
  return made;
}

bool ok = true;
void check(bool truth, const std::string& what) {
  if (!truth) std::printf("%s\n", what.c_str());
  ok &= truth;
}

struct Shape {
  int64_t kv_heads, group, k_dim, v_dim;
};

// Pages of one layer, allocated to the byte and full of NaN.
struct Cache {
  std::vector<uint8_t> keys, values;
  std::vector<uint16_t> key_scales, value_scales;
  KVPages pages;

  Cache(const Shape& s, int64_t type, int64_t blocks, int64_t block_size) {
    const int64_t rows = blocks * block_size * s.kv_heads;
    keys.assign(static_cast<size_t>(rows * s.k_dim * element_bytes(type)), 0xff);
    values.assign(static_cast<size_t>(rows * s.v_dim * element_bytes(type)), 0xff);
    if (type == kKVInt8) {
      key_scales.assign(static_cast<size_t>(rows), 0xffff);
      value_scales.assign(static_cast<size_t>(rows), 0xffff);
    }
    pages = {keys.data(), values.data(), key_scales.data(), value_scales.data(), type, type,
             blocks, block_size, s.kv_heads, s.k_dim, s.v_dim};
  }
};

// Sequences in scattered blocks, as a batch of their last `queries` tokens.
struct Batch {
  std::vector<int32_t> table, starts, lengths, query_starts;
  std::vector<int64_t> slots, positions;
  int64_t width = 0, blocks = 0;

  Batch(const std::vector<int64_t>& tokens, const std::vector<int64_t>& queries, int64_t block_size) {
    for (int64_t count : tokens) {
      width = std::max(width, (count + block_size - 1) / block_size + 1);
      blocks += (count + block_size - 1) / block_size;
    }
    int32_t next = static_cast<int32_t>(blocks);
    query_starts.push_back(0);
    for (size_t s = 0; s < tokens.size(); ++s) {
      const int64_t own = (tokens[s] + block_size - 1) / block_size;
      for (int64_t b = 0; b < width; ++b) {
        table.push_back(b < own ? --next : -1);
        starts.push_back(b < own ? static_cast<int32_t>(b * block_size) : 0);
      }
      for (int64_t p = tokens[s] - queries[s]; p < tokens[s]; ++p) {
        positions.push_back(p);
        slots.push_back(table[s * width + p / block_size] * block_size + p % block_size);
      }
      lengths.push_back(static_cast<int32_t>(tokens[s]));
      query_starts.push_back(static_cast<int32_t>(positions.size()));
    }
  }
  GroupTables tables() const { return {table.data(), starts.data(), slots.data(), lengths.data(), width}; }
  BatchRows rows() const {
    return {positions.data(), query_starts.data(), static_cast<int64_t>(lengths.size()),
            static_cast<int64_t>(positions.size())};
  }
};

// Stores whole sequences through qk_norm_rope_store, then attends from every one of their tokens.
void attention(void* pool, const Shape& s, int64_t type, int64_t block_size, int64_t window, float softcap) {
  const std::vector<int64_t> tokens{150, 1, 37};
  const Batch batch(tokens, tokens, block_size);
  Cache cache(s, type, batch.blocks, block_size);
  const int64_t heads = s.kv_heads * s.group, count = batch.rows().tokens;
  const int64_t width = (heads + s.kv_heads) * s.k_dim + s.kv_heads * s.v_dim;
  const auto qkv = random_floats(count * width);
  std::vector<float> q(static_cast<size_t>(count * heads * s.k_dim)), out(static_cast<size_t>(count * heads * s.v_dim));
  const std::vector<float> none;
  RopeStoreCall store{qkv.data(), q.data(), nullptr, nullptr, none.data(), none.data(), cache.pages, batch.slots.data(),
                      heads, 0, count, 1e-6f};
  const std::string name = "attention: type " + std::to_string(type) + ", dims " + std::to_string(s.k_dim) + " " +
                           std::to_string(s.v_dim) + ", block " + std::to_string(block_size) + ", window " + std::to_string(window);
  check(edgellm_qk_norm_rope_store(pool, &store) == 0, name + ": store");
  const float scale = 1.0f / std::sqrt(static_cast<float>(s.k_dim));
  const AttentionCall call{q.data(), out.data(), cache.pages, batch.tables(), batch.rows(), heads, window, scale, softcap};
  check(edgellm_paged_attention(pool, &call) == 0, name);
  double worst = 0;
  for (size_t seq = 0; seq < tokens.size(); ++seq) {
    const int64_t first = batch.query_starts[seq];
    for (int64_t p = 0; p < tokens[seq]; ++p) {
      for (int64_t h = 0; h < heads; ++h) {
        std::vector<double> weights;
        const int64_t oldest = window > 0 ? std::max<int64_t>(0, p - window + 1) : 0;
        for (int64_t key = oldest; key <= p; ++key) {
          const float* k = qkv.data() + (first + key) * width + (heads + h / s.group) * s.k_dim;
          double score = 0;
          for (int64_t d = 0; d < s.k_dim; ++d) score += static_cast<double>(qkv[(first + p) * width + h * s.k_dim + d]) * k[d];
          score *= scale;
          if (softcap > 0) score = std::tanh(score / softcap) * softcap;
          weights.push_back(std::exp(score));
        }
        const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
        for (int64_t d = 0; d < s.v_dim; ++d) {
          double sum = 0;
          for (size_t i = 0; i < weights.size(); ++i)
            sum += weights[i] * qkv[(first + oldest + static_cast<int64_t>(i)) * width + (heads + s.kv_heads) * s.k_dim + (h / s.group) * s.v_dim + d];
          const double got = out[((first + p) * heads + h) * s.v_dim + d];
          worst = std::max(worst, std::isfinite(got) ? std::fabs(got - sum / total) : 1e9);
        }
      }
    }
  }
  const double bound = type == kKVF32 ? 1e-5 : type == kKVF16 ? 2e-3 : 2e-2;
  check(worst <= bound, name + ": off by " + std::to_string(worst));
  Batch bad = batch;
  bad.table[0] = static_cast<int32_t>(batch.blocks);
  AttentionCall outside = call;
  outside.tables = bad.tables();
  check(edgellm_paged_attention(pool, &outside) == 1, name + ": a block outside");
  bad.slots[0] = batch.blocks * block_size;
  store.slots = bad.slots.data();
  check(edgellm_qk_norm_rope_store(pool, &store) == 1, name + ": a slot outside");
}

struct Linear {
  std::vector<uint8_t> data;
  std::vector<float> bias;
  StepLinear call{};

  Linear(void* pool, Format format, int64_t n, int64_t k) : bias(random_floats(n)) {
    const FormatInfo info = format_info(format);
    std::vector<uint8_t> rows(static_cast<size_t>(n * (k / info.unit) * info.bytes));
    for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(info.bytes)) {
      for (int64_t i = 0; i < info.bytes; ++i) rows[at + static_cast<size_t>(i)] = static_cast<uint8_t>(next_random());
      if (format == Format::kF32) {
        const float value = 0.2f * next_float();
        std::memcpy(&rows[at], &value, 4);
      } else {  // Q4_0, Q8_0: a small scale
        rows[at + 1] = format == Format::kQ8_0 ? 0x10 : 0x24;
      }
    }
    data.resize(static_cast<size_t>((n + kTileRows - 1) / kTileRows * kTileRows * (k / info.unit) * info.bytes));
    check(edgellm_pack(pool, static_cast<int32_t>(format), rows.data(), n, k, data.data(), static_cast<int64_t>(data.size())) == 0, "pack");
    call.formats[0] = static_cast<int64_t>(format);
    call.rows[0] = n;
    call.data[0] = data.data();
    call.biases[0] = bias.data();
    call.parts = 1;
    call.k = k;
  }
};

// Two layers over prompts of 21 and 3 tokens: in one pass, and token by token.
void step(void* one, void* three, Format format, int64_t hidden, int64_t ffn, int64_t type, bool exact) {
  const Shape s{1, 3, 8, 8};
  const int64_t heads = 3, vocab = 41, pairs = 3;
  Linear qkv(one, format, (heads + 1) * 8 + 8, hidden), attn_output(one, Format::kF32, hidden, heads * 8);
  Linear gate_up(one, format, 2 * ffn, hidden), down(one, format, hidden, ffn), head(one, format, vocab, hidden);
  const auto gain = random_floats(hidden), head_gain = random_floats(8), frequencies = random_floats(pairs);
  const StepLayer layer{gain.data(), gain.data(), head_gain.data(), head_gain.data(), gain.data(), gain.data(),
                        qkv.call, attn_output.call, gate_up.call, down.call, 0, 0, 9};
  const StepLayer layers[2] = {layer, layer};
  const StepRope ropes[1] = {{frequencies.data(), pairs, 1.0f, 0}};
  const StepModel model{layers, ropes, gain.data(), head.call, head.call, 2, 1, 1, hidden, heads, ffn, 1, exact, 1e-6f, 0.3f, 0.0f, 2.0f};
  void* program = nullptr;
  check(edgellm_step_new(&model, &program) == 0, "a step program");
  const std::string name = "step: format " + std::to_string(static_cast<int>(format)) + ", type " + std::to_string(type);
  const std::vector<int64_t> tokens{21, 3};
  std::vector<float> whole;
  for (void* pool : {one, three}) {
    for (const bool by_token : {false, true}) {
      std::vector<float> found(static_cast<size_t>(24 * vocab));
      const Batch all(tokens, tokens, 4);
      Cache first(s, type, all.blocks, 4), second(s, type, all.blocks, 4);
      const KVPages pages[2] = {first.pages, second.pages};
      for (int64_t turn = 0; turn < (by_token ? 21 : 1); ++turn) {
        const bool both = turn < 3;
        const Batch batch = !by_token ? all
                            : both    ? Batch({21, 3}, {21 - turn, 3 - turn}, 4)
                                      : Batch({21, 3}, {21 - turn, 0}, 4);
        // Of by_token only the first token of each sequence, whose slots and tables are those of the whole.
        std::vector<int64_t> positions, slots, ids, wanted;
        std::vector<int32_t> starts{0}, lengths;
        for (int64_t seq = 0; seq < 2; ++seq) {
          const int64_t from = batch.query_starts[seq], has = batch.query_starts[seq + 1] - from;
          const int64_t take = by_token ? std::min<int64_t>(1, has) : has;
          for (int64_t i = 0; i < take; ++i) {
            positions.push_back(batch.positions[from + i]);
            slots.push_back(batch.slots[from + i]);
            ids.push_back((7 * positions.back() + 11 * seq) % vocab);
            wanted.push_back(static_cast<int64_t>(wanted.size()));
          }
          starts.push_back(static_cast<int32_t>(positions.size()));
          lengths.push_back(take == 0 ? batch.lengths[seq] : static_cast<int32_t>(positions.back() + 1));
        }
        const GroupTables tables{batch.table.data(), batch.starts.data(), slots.data(), lengths.data(), batch.width};
        const int64_t count = static_cast<int64_t>(positions.size());
        std::vector<float> logits(static_cast<size_t>(count * vocab));
        StepCall call{ids.data(), nullptr, pages, &tables, nullptr, wanted.data(), nullptr, logits.data(), nullptr, nullptr,
                      {positions.data(), starts.data(), 2, count}, count};
        check(edgellm_step_run(pool, program, &call) == 0, name);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t row = (i < starts[1] ? 0 : 21) + positions[i];
          std::copy(&logits[i * vocab], &logits[i * vocab] + vocab, &found[row * vocab]);
        }
        if (turn > 0) continue;
        // What goes into the head, of the last row only; and ids outside are refused.
        std::vector<float> x(static_cast<size_t>(hidden)), residual(static_cast<size_t>(hidden));
        StepCall narrow = call;
        narrow.logits = nullptr;
        narrow.last_x = x.data();
        narrow.last_residual = residual.data();
        narrow.logit_rows = &wanted.back();
        narrow.num_logit_rows = 1;
        check(edgellm_step_run(pool, program, &narrow) == 0, name + ": the last row");
        ids[0] = vocab;
        check(edgellm_step_run(pool, program, &call) == 1, name + ": an id outside");
      }
      for (float value : found) check(std::isfinite(value), name + ": not finite");
      if (whole.empty()) whole = found;
      check(std::memcmp(whole.data(), found.data(), whole.size() * 4) == 0, name + (by_token ? ": other bits by token" : ": other bits"));
    }
  }
  double seconds[Step::kOps];
  check(edgellm_step_seconds(program, seconds) == 0 && edgellm_step_delete(program) == 0, "the end of a step program");
}

void rows_and_largest(void* pool) {
  for (int64_t n : {1, 7, 16, 45}) {
    const auto x = random_floats(3 * n), residual = random_floats(3 * n), gain = random_floats(n);
    std::vector<float> sum(static_cast<size_t>(3 * n)), out(static_cast<size_t>(3 * n));
    for (const float* added : {static_cast<const float*>(nullptr), x.data()})
      for (const float* post : {static_cast<const float*>(nullptr), gain.data()})
        check(edgellm_add_rms_norm(pool, added, residual.data(), gain.data(), post, 1e-6f, 3, n, sum.data(), out.data()) == 0, "norm");
    for (int32_t which : {0, 1, 2, 3}) check(edgellm_apply(which, x.data(), n, out.data()) == 0, "apply");
    const std::vector<int64_t> positions{0, 5, 70000};
    for (int32_t per_token : {0, 1})
      check(edgellm_rope_angles(positions.data(), per_token ? x.data() : gain.data(), per_token, 3, n, 1.0f, sum.data(), out.data()) == 0, "angles");
  }
  for (int64_t n : {1, 9, 16383, 16384, 16385, 40001}) {
    auto x = random_floats(2 * n);
    x[n / 2] = 7.0f;                                              // of the first row
    x[2 * n - 1] = std::numeric_limits<float>::quiet_NaN();       // of the second
    std::vector<float> values(2);
    std::vector<int64_t> places(2);
    check(edgellm_largest(pool, x.data(), 2, n, values.data(), places.data()) == 0, "largest");
    check((n == 1 || (values[0] == 7.0f && places[0] == n / 2)) && std::isnan(values[1]) && places[1] == n - 1,
          "the largest of " + std::to_string(n));
  }
}

}  // namespace

int main() {
  void *one = nullptr, *three = nullptr;
  if (edgellm_pool_new(1, &one) != 0 || edgellm_pool_new(3, &three) != 0) return 1;
  for (int64_t type : {kKVF32, kKVF16, kKVBF16, kKVInt8}) {
    attention(one, {1, 1, 8, 24}, type, 1, 0, 0.0f);
    attention(three, {2, 3, 13, 7}, type, 3, 0, 5.0f);
    attention(three, {1, 5, 64, 64}, type, 16, 20, 0.0f);
    step(one, three, Format::kF32, 45, 19, type, true);
    step(one, three, Format::kQ4_0, 64, 96, type, false);
  }
  step(one, three, Format::kQ8_0, 96, 32, kKVF16, false);
  for (void* pool : {one, three}) rows_and_largest(pool);
  check(edgellm_pool_delete(one) == 0 && edgellm_pool_delete(three) == 0, "the end of a pool");
  return ok ? 0 : 1;
}
