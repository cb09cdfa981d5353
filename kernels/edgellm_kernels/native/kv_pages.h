// Where KV lies: the pages of one layer, and the tables and rows of a batch. Plain structs that native_structs.py
// mirrors field by field; see batch.py for what the fields mean.
#pragma once

#include <cstdint>

namespace edgellm {

enum KVType : int64_t { kKVF32 = 0, kKVF16 = 1, kKVBF16 = 2, kKVInt8 = 3 };

struct KVPages {
  void* keys;              // [blocks, block_size, kv_heads, k_dim]
  void* values;            // [blocks, block_size, kv_heads, v_dim]
  uint16_t* key_scales;    // [blocks, block_size, kv_heads] f16, of int8 keys
  uint16_t* value_scales;
  int64_t key_type, value_type;
  int64_t blocks, block_size, kv_heads, k_dim, v_dim;
};

struct GroupTables {
  const int32_t* block_table;      // [sequences, max_blocks], -1 pads
  const int32_t* block_positions;  // [sequences, max_blocks]
  const int64_t* slot_mapping;     // [tokens], below 0: not stored
  const int32_t* key_lengths;      // [sequences]
  int64_t max_blocks;
};

struct BatchRows {
  const int64_t* positions;      // [tokens]
  const int32_t* query_starts;   // [sequences + 1]
  int64_t sequences, tokens;
};

// Keys are stored in Hadamard space, and queries have to be brought there.
inline bool rotates_keys(const KVPages& p) { return p.key_type == kKVInt8 && (p.k_dim & (p.k_dim - 1)) == 0; }

// Every id and range of the tables lies inside of the pages and rows. Reading them is all that an op trusts.
bool tables_fit(const KVPages& pages, const GroupTables& tables, const BatchRows& rows);

// One of K and V of a layer.
struct KVSide {
  void* data;
  uint16_t* scales;
  int64_t type, kv_heads, dim;

  int64_t row(int64_t slot, int64_t head) const { return slot * kv_heads + head; }
};

inline KVSide key_side(const KVPages& p) { return {p.keys, p.key_scales, p.key_type, p.kv_heads, p.k_dim}; }
inline KVSide value_side(const KVPages& p) {
  return {p.values, p.value_scales, p.value_type, p.kv_heads, p.v_dim};
}

// x[dim] H in place, with the orthonormal Hadamard matrix H; dim is a power of two. The bits are those of
// kv_store_torch.py.
void hadamard(float* x, int64_t dim);
// Stored rows of one head as f32, out[count][width], behind dim filled with zeros; zeros where a slot is below 0.
void decode_rows(const KVSide& side, const int64_t* slots, int64_t count, int64_t head, float* out, int64_t width);
// Stores x[dim]: the same bytes as kv_store_torch.py from the same floats.
void encode_row(const KVSide& side, int64_t row, const float* x);

}  // namespace edgellm
