// A whole pass of the decoder over a ragged batch: the same ops in the same order as Decoder.forward, so the same
// bits. The structs hold addresses of what the caller keeps; native_structs.py mirrors them.
#pragma once

#include <mutex>
#include <vector>

#include "kv_pages.h"
#include "linear.h"
#include "thread_pool.h"

namespace edgellm {

constexpr int64_t kMaxParts = 3;

// A linear, or several that share their input, whose outputs lie beside each other.
struct StepLinear {
  int64_t formats[kMaxParts], rows[kMaxParts];
  const uint8_t* data[kMaxParts];
  const float* biases[kMaxParts];
  const int64_t* orders[kMaxParts];  // [k]: column j of the part's weight reads x[order[j]]; or null: x as it is
  int64_t parts, k;
};

struct StepLayer {
  const float *attn_norm, *ffn_norm;
  const float *q_norm, *k_norm, *post_attention_norm, *post_ffn_norm;  // or null
  StepLinear qkv, attn_output, gate_up, down;
  int64_t group, rope;
  int64_t window;  // 0 is none
};

struct StepRope {
  const float* frequencies;  // [pairs]
  int64_t pairs;
  float factor;
  int32_t reserved;
};

struct StepModel {
  const StepLayer* layers;
  const StepRope* ropes;
  const float* output_norm;
  StepLinear head;
  StepLinear embedding;  // no parts: the caller gives embedded rows
  int64_t num_layers, num_ropes, num_groups;
  int64_t hidden, heads, ffn;
  int64_t activation;  // see gate.h
  int64_t exact;       // f32 activations
  float eps, query_scale, softcap, embedding_scale;
};

constexpr uint8_t kSkipsAttention = 1, kSkipsFeedForward = 2;

struct StepCall {
  const int64_t* token_ids;    // [tokens]; read where the model has an embedding
  const float* embedded;       // [tokens, hidden]; read where it has none
  const KVPages* pages;        // [layers]
  const GroupTables* groups;   // [groups]
  const float* const* angles;  // [ropes]: frequencies [tokens, pairs] in place of the rope's own, or null
  const int64_t* logit_rows;   // [num_logit_rows]
  const uint8_t* skipped;      // [layers]: bit 0 leaves the attention out, bit 1 the feed-forward; or null
  float* logits;               // [num_logit_rows, vocab]; null: the two below in its place
  float* last_x;               // [num_logit_rows, hidden]: the last sub-layer's output, not yet added
  float* last_residual;        // [num_logit_rows, hidden]
  BatchRows rows;
  int64_t num_logit_rows;
};

class Step {
 public:
  explicit Step(const StepModel& model);
  // False where a table, id or row lies outside of what it points into. Calls take turns.
  bool run(Pool& pool, const StepCall& call);
  // Seconds spent in each kind of op since the last call, in the order of kOps.
  void take_seconds(double* seconds);

  enum Op { kEmbed, kNorm, kQkv, kRope, kAttention, kAttnOutput, kGateUp, kGate, kDown, kHead, kOps };

 private:
  struct Buffers {
    std::vector<float> residual, normed, qkv, q, attended, x, gate_up, gated, cos, sin, head_x, head_residual;
    std::vector<float> ordered;
    std::vector<ActivationBlock> blocks, ordered_blocks;
    std::vector<int64_t> positions;      // of the rows that the last layer goes on with
    std::vector<int32_t> query_starts;
  };

  bool fits(const StepCall& call) const;
  void norm(
      Pool& pool, const float* x, const float* gain, const float* post_gain, float* residual, float* out,
      int64_t rows, bool quantize);
  void multiply(Pool& pool, const StepLinear& linear, const float* x, int64_t rows, float* out);
  LinearInput in_order(Pool& pool, const int64_t* order, const float* x, int64_t k, int64_t rows);
  const ActivationBlock* blocks_for(int64_t k) const;
  void quantize(Pool& pool, const float* x, int64_t k, int64_t rows);
  void attend(Pool& pool, const StepCall& call, int64_t layer, BatchRows& rows);
  void narrow(const StepCall& call, int64_t q_width, BatchRows& rows);
  void feed_forward(Pool& pool, const StepLayer& layer, int64_t rows);
  bool start(Pool& pool, const StepCall& call);

  const StepModel model_;
  const std::vector<StepLayer> layers_;
  const std::vector<StepRope> ropes_;
  std::mutex mutex_;
  Buffers b_;
  double seconds_[kOps] = {};
};

// The largest of x[n] and its first place; NaN where there is one.
void largest(Pool& pool, const float* x, int64_t n, float* value, int64_t* place);

}  // namespace edgellm
