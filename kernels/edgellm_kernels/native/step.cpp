#include "step.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "attention.h"
#include "gate.h"
#include "rows.h"
#include "simd.h"

namespace edgellm {
namespace {

using Clock = std::chrono::steady_clock;

// Adds the time of its life to one op.
class Timer {
 public:
  explicit Timer(double& seconds) : seconds_(seconds), begin_(Clock::now()) {}
  ~Timer() { seconds_ += std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  double& seconds_;
  const Clock::time_point begin_;
};

constexpr int64_t kRowsPerTask = 8;
// Columns of a gate that one task computes where there are few rows: whole activation blocks.
constexpr int64_t kGateColumns = 512;

template <class F> void by_row(Pool& pool, int64_t rows, F&& body) {
  pool.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
    for (int64_t row = task * kRowsPerTask; row < std::min(rows, (task + 1) * kRowsPerTask); ++row) body(row);
  });
}

PackedWeight part_of(const StepLinear& linear, int64_t part) {
  return {static_cast<Format>(linear.formats[part]), linear.rows[part], linear.k, linear.data[part],
          linear.biases[part]};
}

int64_t width_of(const StepLinear& linear) {
  int64_t width = 0;
  for (int64_t part = 0; part < linear.parts; ++part) width += linear.rows[part];
  return width;
}

template <class T> T* grown(std::vector<T>& buffer, int64_t size) {
  if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(static_cast<size_t>(size));
  return buffer.data();
}

}  // namespace

Step::Step(const StepModel& model)
    : model_(model),
      layers_(model.layers, model.layers + model.num_layers),
      ropes_(model.ropes, model.ropes + model.num_ropes) {}

bool Step::fits(const StepCall& call) const {
  const BatchRows& rows = call.rows;
  for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
    const KVPages& pages = call.pages[layer];
    if (pages.kv_heads < 1 || model_.heads % pages.kv_heads != 0) return false;
    if (width_of(layers_[layer].qkv) != (model_.heads + pages.kv_heads) * pages.k_dim + pages.kv_heads * pages.v_dim)
      return false;
    if (2 * ropes_[layers_[layer].rope].pairs > pages.k_dim) return false;
    // Layers of a group share tables and sizes: one look is enough.
    bool first = true;
    for (int64_t before = 0; before < layer; ++before) first = first && layers_[before].group != layers_[layer].group;
    if (first && !tables_fit(pages, call.groups[layers_[layer].group], rows)) return false;
  }
  if (call.skipped != nullptr && (call.skipped[0] | call.skipped[model_.num_layers - 1]) != 0) return false;
  for (int64_t i = 0; i < call.num_logit_rows; ++i) {
    if (call.logit_rows[i] < 0 || call.logit_rows[i] >= rows.tokens) return false;
  }
  if (model_.embedding.parts > 0) {
    for (int64_t t = 0; t < rows.tokens; ++t) {
      if (call.token_ids[t] < 0 || call.token_ids[t] >= model_.embedding.rows[0]) return false;
    }
  }
  return true;
}

const ActivationBlock* Step::blocks_for(int64_t k) const {
  return model_.exact || k % kActivationBlock != 0 ? nullptr : b_.blocks.data();
}

void Step::quantize(Pool& pool, const float* x, int64_t k, int64_t rows) {
  if (blocks_for(k) == nullptr) return;
  by_row(pool, rows, [&](int64_t row) {
    quantize_row(x + row * k, k, b_.blocks.data() + row * (k / kActivationBlock));
  });
}

void Step::norm(
    Pool& pool, const float* x, const float* gain, const float* post_gain, float* residual, float* out, int64_t rows,
    bool quantize) {
  const int64_t n = model_.hidden;
  const bool blocks = quantize && blocks_for(n) != nullptr;
  by_row(pool, rows, [&](int64_t row) {
    const int64_t at = row * n;
    add_rms_norm(
        x == nullptr ? nullptr : x + at, residual + at, gain, post_gain, model_.eps, n, residual + at, out + at);
    if (blocks) quantize_row(out + at, n, b_.blocks.data() + row * (n / kActivationBlock));
  });
}

// x with its columns in a part's order, quantized anew where the linears multiply integers.
LinearInput Step::in_order(Pool& pool, const int64_t* order, const float* x, int64_t k, int64_t rows) {
  if (order == nullptr) return {x, blocks_for(k), rows};
  float* const ordered = grown(b_.ordered, rows * k);
  const int64_t blocks = k / kActivationBlock;
  ActivationBlock* const quantized = blocks_for(k) == nullptr ? nullptr : grown(b_.ordered_blocks, rows * blocks);
  by_row(pool, rows, [&](int64_t row) {
    const float* from = x + row * k;
    float* to = ordered + row * k;
    for (int64_t i = 0; i < k; ++i) to[i] = from[order[i]];
    if (quantized != nullptr) quantize_row(to, k, quantized + row * blocks);
  });
  return {ordered, quantized, rows};
}

void Step::multiply(Pool& pool, const StepLinear& linear, const float* x, int64_t rows, float* out) {
  const int64_t width = width_of(linear);
  bool ordered = false;
  for (int64_t part = 0; part < linear.parts; ++part) ordered = ordered || linear.orders[part] != nullptr;
  if (ordered) {  // the buffers hold one order at a time
    int64_t column = 0;
    for (int64_t part = 0; part < linear.parts; column += linear.rows[part++]) {
      const LinearInput input = in_order(pool, linear.orders[part], x, linear.k, rows);
      const PackedWeight weight = part_of(linear, part);
      pool.parallel_for(linear_tasks(weight, rows), [&](int64_t task) {
        linear_task(weight, input, {out + column, width, nullptr}, task);
      });
    }
    return;
  }
  const LinearInput input{x, blocks_for(linear.k), rows};
  PackedWeight parts[kMaxParts];
  int64_t tasks[kMaxParts], columns[kMaxParts], total = 0, column = 0;
  for (int64_t part = 0; part < linear.parts; ++part) {
    parts[part] = part_of(linear, part);
    tasks[part] = linear_tasks(parts[part], rows);
    columns[part] = column;
    column += linear.rows[part];
    total += tasks[part];
  }
  pool.parallel_for(total, [&](int64_t task) {
    int64_t part = 0;
    while (task >= tasks[part]) task -= tasks[part++];
    linear_task(parts[part], input, {out + columns[part], width, nullptr}, task);
  });
}

// Behind the last K and V only rows whose logits are wanted matter: moves their q and residual to the front, and
// `rows` is about them from then on. Leaves all as it is where they do not come in the batch's order.
void Step::narrow(const StepCall& call, int64_t q_width, BatchRows& rows) {
  const int64_t wanted = call.num_logit_rows, hidden = model_.hidden, sequences = rows.sequences;
  if (wanted == rows.tokens) return;
  for (int64_t i = 0; i < wanted; ++i) {
    if (call.logit_rows[i] < (i == 0 ? rows.query_starts[0] : call.logit_rows[i - 1] + 1)) return;
    if (call.logit_rows[i] >= rows.query_starts[sequences]) return;
  }
  int64_t* const positions = grown(b_.positions, wanted);
  int32_t* const starts = grown(b_.query_starts, sequences + 1);
  int64_t i = 0;
  for (int64_t s = 0; s <= sequences; ++s) {
    while (i < wanted && call.logit_rows[i] < rows.query_starts[s]) ++i;
    starts[s] = static_cast<int32_t>(i);
  }
  for (i = 0; i < wanted; ++i) {
    const int64_t from = call.logit_rows[i];
    positions[i] = rows.positions[from];
    std::memmove(b_.q.data() + i * q_width, b_.q.data() + from * q_width, static_cast<size_t>(q_width) * 4);
    std::memmove(b_.residual.data() + i * hidden, b_.residual.data() + from * hidden, static_cast<size_t>(hidden) * 4);
  }
  rows = {positions, starts, sequences, wanted};
}

// `rows` are the batch's; behind the last layer's K and V those that the pass goes on with.
void Step::attend(Pool& pool, const StepCall& call, int64_t index, BatchRows& rows) {
  const StepLayer& layer = layers_[index];
  const KVPages& pages = call.pages[index];
  const int64_t tokens = call.rows.tokens;
  {
    Timer timer(seconds_[kQkv]);
    multiply(pool, layer.qkv, b_.normed.data(), tokens, b_.qkv.data());
  }
  {
    Timer timer(seconds_[kRope]);
    int64_t angles = 0;
    for (int64_t r = 0; r < layer.rope; ++r) angles += ropes_[r].pairs * tokens;
    const RopeStoreCall store{
        b_.qkv.data(), b_.q.data(), layer.q_norm, layer.k_norm, b_.cos.data() + angles, b_.sin.data() + angles,
        pages, call.groups[layer.group].slot_mapping, model_.heads, ropes_[layer.rope].pairs, tokens, model_.eps};
    by_row(pool, tokens, [&](int64_t token) { qk_norm_rope_store(store, token); });
  }
  if (index + 1 == model_.num_layers) narrow(call, model_.heads * pages.k_dim, rows);
  {
    Timer timer(seconds_[kAttention]);
    const AttentionCall attention{b_.q.data(), b_.attended.data(), pages, call.groups[layer.group], rows,
                                  model_.heads, layer.window, model_.query_scale, model_.softcap};
    paged_attention(pool, attention);
    quantize(pool, b_.attended.data(), layer.attn_output.k, rows.tokens);
  }
  Timer timer(seconds_[kAttnOutput]);
  multiply(pool, layer.attn_output, b_.attended.data(), rows.tokens, b_.x.data());
}

void Step::feed_forward(Pool& pool, const StepLayer& layer, int64_t rows) {
  {
    Timer timer(seconds_[kGateUp]);
    multiply(pool, layer.gate_up, b_.normed.data(), rows, b_.gate_up.data());
  }
  {
    Timer timer(seconds_[kGate]);
    const int64_t n = model_.ffn, chunks = (n + kGateColumns - 1) / kGateColumns;
    const bool blocks = blocks_for(n) != nullptr;
    pool.parallel_for(rows * chunks, [&](int64_t task) {
      const int64_t row = task / chunks, first = task % chunks * kGateColumns;
      const int64_t count = std::min(kGateColumns, n - first);
      const float* gate = b_.gate_up.data() + row * 2 * n + first;
      float* out = b_.gated.data() + row * n + first;
      gate_row(static_cast<Activation>(model_.activation), gate, gate + n, count, out);
      if (blocks) quantize_row(out, count, b_.blocks.data() + (row * n + first) / kActivationBlock);
    });
  }
  Timer timer(seconds_[kDown]);
  multiply(pool, layer.down, b_.gated.data(), rows, b_.x.data());
}

bool Step::start(Pool& pool, const StepCall& call) {
  const int64_t tokens = call.rows.tokens, hidden = model_.hidden, out_rows = call.num_logit_rows;
  int64_t qkv = 0, q = 0, attended = 0, pairs = 0, widest = std::max(hidden, model_.ffn);
  for (int64_t layer = 0; layer < model_.num_layers; ++layer) {
    const KVPages& pages = call.pages[layer];
    qkv = std::max(qkv, width_of(layers_[layer].qkv));
    q = std::max(q, model_.heads * pages.k_dim);
    attended = std::max(attended, model_.heads * pages.v_dim);
  }
  widest = std::max(widest, attended);
  for (const StepRope& rope : ropes_) pairs += rope.pairs;
  grown(b_.residual, tokens * hidden);
  grown(b_.normed, std::max(tokens, out_rows) * hidden);
  grown(b_.qkv, tokens * qkv);
  grown(b_.q, tokens * q);
  grown(b_.attended, tokens * attended);
  grown(b_.x, tokens * hidden);
  grown(b_.gate_up, tokens * 2 * model_.ffn);
  grown(b_.gated, tokens * model_.ffn);
  grown(b_.head_x, out_rows * hidden);
  grown(b_.head_residual, out_rows * hidden);
  grown(b_.blocks, std::max(tokens, out_rows) * ((widest + kActivationBlock - 1) / kActivationBlock));
  float* cos = grown(b_.cos, tokens * pairs);
  float* sin = grown(b_.sin, tokens * pairs);
  for (int64_t r = 0; r < model_.num_ropes; ++r) {
    const StepRope& rope = ropes_[r];
    const float* own = call.angles == nullptr ? nullptr : call.angles[r];
    by_row(pool, tokens, [&](int64_t t) {
      const float* frequencies = own == nullptr ? rope.frequencies : own + t * rope.pairs;
      rope_angles(
          call.rows.positions[t], frequencies, rope.pairs, rope.factor, cos + t * rope.pairs, sin + t * rope.pairs);
    });
    cos += tokens * rope.pairs;
    sin += tokens * rope.pairs;
  }
  if (model_.embedding.parts == 0) {
    std::copy(call.embedded, call.embedded + tokens * hidden, b_.residual.data());
    return true;
  }
  const PackedWeight table = part_of(model_.embedding, 0);
  by_row(pool, tokens, [&](int64_t t) {
    decode_row(table, call.token_ids[t], model_.embedding_scale, b_.residual.data() + t * hidden);
  });
  return true;
}

bool Step::run(Pool& pool, const StepCall& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!fits(call)) return false;
  const int64_t hidden = model_.hidden;
  BatchRows rows = call.rows;
  {
    Timer timer(seconds_[kEmbed]);
    start(pool, call);
  }
  float* const residual = b_.residual.data();
  const float* x = nullptr;
  const float* post_norm = nullptr;
  for (int64_t index = 0; index < model_.num_layers; ++index) {
    const StepLayer& layer = layers_[index];
    const uint8_t skipped = call.skipped == nullptr ? 0 : call.skipped[index];
    if ((skipped & kSkipsAttention) == 0) {
      {
        Timer timer(seconds_[kNorm]);
        norm(pool, x, layer.attn_norm, post_norm, residual, b_.normed.data(), rows.tokens, true);
      }
      attend(pool, call, index, rows);
      x = b_.x.data();
      post_norm = layer.post_attention_norm;
    }
    if ((skipped & kSkipsFeedForward) == 0) {
      {
        Timer timer(seconds_[kNorm]);
        norm(pool, x, layer.ffn_norm, post_norm, residual, b_.normed.data(), rows.tokens, true);
      }
      feed_forward(pool, layer, rows.tokens);
      x = b_.x.data();
      post_norm = layer.post_ffn_norm;
    }
  }
  Timer timer(seconds_[kHead]);
  float* const last_x = call.logits == nullptr ? call.last_x : b_.head_x.data();
  float* const last_residual = call.logits == nullptr ? call.last_residual : b_.head_residual.data();
  const bool narrowed = rows.tokens != call.rows.tokens;
  for (int64_t i = 0; i < call.num_logit_rows; ++i) {
    const int64_t from = (narrowed ? i : call.logit_rows[i]) * hidden;
    std::copy(x + from, x + from + hidden, last_x + i * hidden);
    std::copy(residual + from, residual + from + hidden, last_residual + i * hidden);
  }
  if (call.logits == nullptr) return true;
  norm(
      pool, last_x, model_.output_norm, post_norm, last_residual, b_.normed.data(),
      call.num_logit_rows, true);
  multiply(pool, model_.head, b_.normed.data(), call.num_logit_rows, call.logits);
  return true;
}

void Step::take_seconds(double* seconds) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int op = 0; op < kOps; ++op) {
    seconds[op] = seconds_[op];
    seconds_[op] = 0.0;
  }
}

void largest(Pool& pool, const float* x, int64_t n, float* value, int64_t* place) {
  using namespace simd;
  constexpr int64_t kPart = 16384;
  const int64_t parts = (n + kPart - 1) / kPart;
  std::vector<float> best(static_cast<size_t>(parts));
  pool.parallel_for(parts, [&](int64_t part) {
    const int64_t first = part * kPart, end = std::min(n, first + kPart);
    F32 peaks = splat(-std::numeric_limits<float>::infinity()), odd = zero();
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      const F32 v = load(x + i);
      peaks = max(v, peaks);         // keeps the peak where v is NaN
      odd = fma(v, zero(), odd);     // NaN as soon as one is not finite
    }
    float peak = max_lanes(peaks);
    for (; i < end; ++i) peak = x[i] > peak ? x[i] : peak;
    const bool all_finite = sum_lanes(odd) == 0.0f;
    for (i = all_finite ? end - (end - first) % kLanes : first; i < end; ++i) {
      if (x[i] != x[i]) peak = x[i];
    }
    best[part] = peak;
  });
  int64_t part = 0;
  for (int64_t p = 0; p < parts; ++p) {
    if (best[p] != best[p]) {
      part = p;
      break;
    }
    if (best[p] > best[part]) part = p;
  }
  *value = best[part];
  const float peak = best[part];
  int64_t i = part * kPart;
  while (i + 1 < n && !(x[i] == peak || (peak != peak && x[i] != x[i]))) ++i;
  *place = i;
}

}  // namespace edgellm
