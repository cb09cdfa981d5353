#include "api_step.h"

#include "step.h"

using namespace edgellm;

namespace {

bool is_linear(const StepLinear& linear) {
  if (linear.parts < 1 || linear.parts > kMaxParts || linear.k < 1) return false;
  for (int64_t part = 0; part < linear.parts; ++part) {
    const FormatInfo info = format_info(static_cast<Format>(linear.formats[part]));
    if (info.unit == 0 || linear.k % info.unit != 0 || linear.rows[part] < 1) return false;
    const int64_t* order = linear.orders[part];
    for (int64_t i = 0; order != nullptr && i < linear.k; ++i)
      if (order[i] < 0 || order[i] >= linear.k) return false;
  }
  return true;
}

bool is_model(const StepModel& model) {
  if (model.num_layers < 1 || model.num_ropes < 1 || model.activation < 0 || model.activation > 1) return false;
  if (!is_linear(model.head) || (model.embedding.parts != 0 && !is_linear(model.embedding))) return false;
  for (int64_t i = 0; i < model.num_layers; ++i) {
    const StepLayer& layer = model.layers[i];
    for (const StepLinear* linear : {&layer.qkv, &layer.attn_output, &layer.gate_up, &layer.down}) {
      if (!is_linear(*linear)) return false;
    }
    if (layer.qkv.k != model.hidden || layer.gate_up.k != model.hidden || layer.down.k != model.ffn) return false;
    if (layer.rope < 0 || layer.rope >= model.num_ropes || layer.group < 0 || layer.group >= model.num_groups)
      return false;
  }
  if (model.embedding.parts != 0 && model.embedding.orders[0] != nullptr) return false;
  return model.head.k == model.hidden && (model.embedding.parts == 0 || model.embedding.k == model.hidden);
}

}  // namespace

int edgellm_step_struct_sizes(int64_t* sizes) {
  sizes[0] = sizeof(StepLinear);
  sizes[1] = sizeof(StepLayer);
  sizes[2] = sizeof(StepRope);
  sizes[3] = sizeof(StepModel);
  sizes[4] = sizeof(StepCall);
  return kOk;
}

int edgellm_step_new(const void* model, void** step) {
  if (!is_model(*static_cast<const StepModel*>(model))) return kBadArgument;
  return guarded([&] {
    *step = new Step(*static_cast<const StepModel*>(model));
    return kOk;
  });
}

int edgellm_step_delete(void* step) {
  delete static_cast<Step*>(step);
  return kOk;
}

int edgellm_step_run(void* pool, void* step, const void* call) {
  return guarded([&] {
    const bool ran = static_cast<Step*>(step)->run(*static_cast<Pool*>(pool), *static_cast<const StepCall*>(call));
    return ran ? kOk : kBadArgument;
  });
}

int edgellm_step_seconds(void* step, double* seconds) {
  static_cast<Step*>(step)->take_seconds(seconds);
  return kOk;
}

int edgellm_largest(void* pool, const float* x, int64_t rows, int64_t n, float* values, int64_t* places) {
  if (rows < 0 || n < 1) return kBadArgument;
  return guarded([&] {
    for (int64_t row = 0; row < rows; ++row) {
      largest(*static_cast<Pool*>(pool), x + row * n, n, values + row, places + row);
    }
    return kOk;
  });
}
