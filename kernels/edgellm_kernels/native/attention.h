// Attention over paged KV.
//
// One order for every query. Keys come in tiles of kTileKeys positions, counted from position 0 of the sequence. In
// a tile a score is a dot product over eight lanes, the weights are summed over eight lanes by the key's place in
// the tile, and the weighted values are added key by key; each tile has its own maximum. Tiles are then merged one by
// one, oldest first. Keys that a query does not see add exact zeros, and tiles in which it sees none are left out. So
// a row's bits do not depend on which other rows are computed with it, on threads or on how tiles are dealt out.
// (A key that is not finite makes the tile's other queries of the same sequence NaN too.)
#pragma once

#include "kv_pages.h"
#include "thread_pool.h"

namespace edgellm {

constexpr int64_t kTileKeys = 128;

// Mirrored by native_structs.py.
struct AttentionCall {
  const float* q;  // [tokens, heads, k_dim]
  float* out;      // [tokens, heads * v_dim]
  KVPages pages;
  GroupTables tables;
  BatchRows rows;
  int64_t heads;
  int64_t window;  // positions that a query sees, its own included; 0 is all
  float scale;
  float softcap;  // 0 is none
};

// Rows behind the last sequence, and rows that see no key, give zeros.
void paged_attention(Pool& pool, const AttentionCall& call);

}  // namespace edgellm
