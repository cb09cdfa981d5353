#include "attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "attention_tile.h"
#include "vector_math.h"

namespace edgellm {
namespace {

using namespace simd;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
// Rows (queries times heads of a group) that share one decoded tile of keys.
constexpr int64_t kMaxRows = 64;
// Floats of parts that tasks of several queries may have together, 512 KiB; planning/workspace.py counts them.
constexpr int64_t kMostParts = 1 << 17;

// Up to so many rows read K and V where they lie; more share what is decoded once. f32 needs no decoding.
constexpr int64_t kRowsInPlace = 24;
// Keys that are asked for before they are read: those of one head lie too far apart for the processor to foresee.
constexpr int64_t kAhead = 24;

int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

// Queries of one sequence with one KV head, over tiles first_tile .. last_tile - 1.
struct Work {
  int64_t sequence, first_row, queries, kv_head, first_tile, last_tile;
  float* parts;  // null: results go to the output; else a Part per tile, merged later
};

// Tiles that several tasks computed, to be merged by one.
struct Split {
  Work whole;
  float* parts;
};

// What a thread needs while it attends. Grown once, kept.
struct Scratch {
  std::vector<float> q, keys, values, scores, weighted, peaks, totals, tile_peaks, tile_totals, old_share, new_share;
  std::vector<int64_t> slots;
  std::vector<float> zeros;
  TileRows key_rows, value_rows;

  void fit(int64_t rows, int64_t k_dim, int64_t v_dim) {
    const auto grow = [](auto& buffer, int64_t size) {
      if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(static_cast<size_t>(size));
    };
    const int64_t whole = (rows + kLanes - 1) / kLanes * kLanes;
    grow(q, rows * k_dim);
    grow(keys, kTileKeys * k_dim);
    grow(values, kTileKeys * v_dim);
    grow(scores, rows * kTileKeys);
    grow(weighted, rows * v_dim);
    for (auto* row : {&peaks, &totals, &tile_peaks, &tile_totals, &old_share, &new_share}) grow(*row, whole);
    grow(slots, kTileKeys + kAhead);
    const int64_t widest = std::max(k_dim, v_dim);
    if (static_cast<int64_t>(zeros.size()) < widest) zeros.assign(static_cast<size_t>(widest), 0.0f);
  }
};

Scratch& scratch() {
  thread_local Scratch buffers;
  return buffers;
}

void weigh_rows(Scratch& s, int64_t rows, int64_t v_dim, int64_t first, int64_t last) {
  visit_type(s.value_rows.type, [&](auto type) {
    weigh_rows_of<type.value>(
        s.scores.data(), s.value_rows, rows, v_dim, first, last, s.old_share.data(), s.new_share.data(),
        s.weighted.data());
  });
}

// Slots of columns first .. last - 1 of a tile, -1 where no key lies. Returns how many there are.
int64_t find_slots(
    const AttentionCall& call, int64_t sequence, int64_t tile, int64_t first, int64_t last, int64_t* slots) {
  const GroupTables& t = call.tables;
  const int64_t block_size = call.pages.block_size, begin = tile * kTileKeys;
  const int32_t* blocks = t.block_table + sequence * t.max_blocks;
  const int32_t* starts = t.block_positions + sequence * t.max_blocks;
  const int64_t key_length = t.key_lengths[sequence];
  std::fill(slots + first, slots + last, int64_t{-1});
  // Live blocks come first, in order of position.
  const int64_t live = std::partition_point(blocks, blocks + t.max_blocks, [](int32_t b) { return b >= 0; }) - blocks;
  const int64_t oldest = begin + first - block_size + 1;
  int64_t found = 0;
  for (int64_t i = std::lower_bound(starts, starts + live, oldest) - starts; i < live; ++i) {
    const int64_t start = starts[i];
    if (start >= begin + last) break;
    const int64_t from = std::max(start, begin + first);
    const int64_t to = std::min({start + block_size, begin + last, key_length});
    for (int64_t p = from; p < to; ++p) {
      slots[p - begin] = blocks[i] * block_size + (p - start);
      ++found;
    }
  }
  return found;
}

// What queries of one sequence see of a tile.
struct Seen {
  int64_t first, last;  // columns that any of them may see
};

Seen seen_columns(const AttentionCall& call, const Work& work, int64_t tile) {
  const int64_t begin = tile * kTileKeys;
  int64_t lowest = call.rows.positions[work.first_row], highest = lowest;
  for (int64_t r = 1; r < work.queries; ++r) {
    lowest = std::min(lowest, call.rows.positions[work.first_row + r]);
    highest = std::max(highest, call.rows.positions[work.first_row + r]);
  }
  const int64_t oldest = call.window > 0 ? lowest - call.window + 1 : 0;
  return {std::max<int64_t>(0, oldest - begin), std::min(kTileKeys, highest + 1 - begin)};
}

class Attender {
 public:
  Attender(const AttentionCall& call, const Work& work)
      : call_(call),
        work_(work),
        group_(call.heads / call.pages.kv_heads),
        rows_(work.queries * group_),
        k_dim_(padded(call.pages.k_dim)),
        v_dim_(padded(call.pages.v_dim)),
        s_(scratch()) {
    s_.fit(rows_, k_dim_, v_dim_);
  }

  void run() {
    load_queries();
    if (work_.parts == nullptr) clear();
    for (int64_t tile = work_.first_tile; tile < work_.last_tile; ++tile) {
      float* part = work_.parts == nullptr ? nullptr : work_.parts + (tile - work_.first_tile) * part_size();
      if (part != nullptr) std::fill(part, part + 2 * rows_, kMinusInfinity);  // peak -inf: nothing seen
      if (!weigh_keys(tile)) continue;
      if (part == nullptr) {
        merge_shares(s_.tile_peaks.data(), s_.tile_totals.data());
        weigh_rows(s_, rows_, v_dim_, columns_.first, columns_.last);
      } else {
        std::memcpy(part, s_.tile_peaks.data(), static_cast<size_t>(rows_) * 4);
        std::memcpy(part + rows_, s_.tile_totals.data(), static_cast<size_t>(rows_) * 4);
        // The sums themselves: 0 * out would keep a NaN of an earlier use.
        std::fill(s_.weighted.begin(), s_.weighted.begin() + rows_ * v_dim_, 0.0f);
        std::fill(s_.old_share.begin(), s_.old_share.end(), 0.0f);
        std::fill(s_.new_share.begin(), s_.new_share.end(), 1.0f);
        weigh_rows(s_, rows_, v_dim_, columns_.first, columns_.last);
        std::memcpy(part + 2 * rows_, s_.weighted.data(), static_cast<size_t>(rows_ * v_dim_) * 4);
      }
    }
    if (work_.parts == nullptr) write();
  }

  // Merges the parts of all tiles, oldest first, and writes the result.
  void merge(const float* parts) {
    clear();
    for (int64_t tile = work_.first_tile; tile < work_.last_tile; ++tile, parts += part_size()) {
      merge_shares(parts, parts + rows_);
      for (int64_t m = 0; m < rows_; ++m) {
        if (s_.new_share[m] == 0.0f && s_.old_share[m] == 1.0f) continue;  // nothing seen
        const F32 a = splat(s_.old_share[m]), b = splat(s_.new_share[m]);
        const float* sums = parts + 2 * rows_ + m * v_dim_;
        float* row = s_.weighted.data() + m * v_dim_;
        for (int64_t d = 0; d < v_dim_; d += kLanes) store(row + d, fma(load(sums + d), b, load(row + d) * a));
      }
    }
    write();
  }

  int64_t part_size() const { return rows_ * (v_dim_ + 2); }

 private:
  void load_queries() {
    const int64_t dim = call_.pages.k_dim;
    for (int64_t m = 0; m < rows_; ++m) {
      const int64_t row = work_.first_row + m / group_, head = work_.kv_head * group_ + m % group_;
      const float* from = call_.q + (row * call_.heads + head) * dim;
      float* to = s_.q.data() + m * k_dim_;
      for (int64_t d = 0; d < dim; ++d) to[d] = from[d] * call_.scale;
      if (rotates_keys(call_.pages)) hadamard(to, dim);
      std::fill(to + dim, to + k_dim_, 0.0f);
    }
  }

  void clear() {
    std::fill(s_.weighted.begin(), s_.weighted.begin() + rows_ * v_dim_, 0.0f);
    std::fill(s_.totals.begin(), s_.totals.end(), 0.0f);
    std::fill(s_.peaks.begin(), s_.peaks.end(), kMinusInfinity);
  }

  // Scores and weights of a tile's keys, the values made ready. False where no query sees a key.
  bool weigh_keys(int64_t tile) {
    const Seen seen = seen_columns(call_, work_, tile);
    if (seen.last <= seen.first) return false;
    columns_ = {seen.first / kLanes * kLanes, (seen.last + kLanes - 1) / kLanes * kLanes};
    int64_t* slots = s_.slots.data();
    const int64_t found = find_slots(call_, work_.sequence, tile, columns_.first, columns_.last, slots);
    if (found == 0) return false;
    const bool holes = found < columns_.last - columns_.first;
    std::fill(slots + columns_.last, slots + columns_.last + kAhead, int64_t{-1});
    if (columns_.last == kTileKeys && tile + 1 < work_.last_tile) {
      find_slots(call_, work_.sequence, tile + 1, 0, kAhead, slots + kTileKeys);
    }
    place_rows(key_side(call_.pages), slots, k_dim_, s_.keys.data(), s_.key_rows);
    place_rows(value_side(call_.pages), slots, v_dim_, s_.values.data(), s_.value_rows);
    score(slots);
    bool any = false;
    for (int64_t m = 0; m < rows_; ++m) {
      if (soften(m, tile, holes, slots)) any = true;
    }
    return any;
  }

  // Where each column's row can be read as it is, or decoded into `buffer`.
  void place_rows(const KVSide& side, const int64_t* slots, int64_t width, float* buffer, TileRows& rows) {
    const int64_t first = columns_.first, last = columns_.last;
    const bool in_place = side.dim == width && (side.type == kKVF32 || rows_ <= kRowsInPlace);
    rows.in_place = in_place;
    rows.type = in_place ? side.type : int64_t{kKVF32};
    if (!in_place) decode_rows(side, slots + first, last - first, work_.kv_head, buffer + first * width, width);
    const int64_t row_bytes = side.dim * element_bytes(side.type);
    for (int64_t c = first; c < last; ++c) {
      rows.scales[c] = 0.0f;
      if (!in_place) {
        rows.data[c] = reinterpret_cast<const uint8_t*>(buffer + c * width);
      } else if (slots[c] < 0) {
        rows.data[c] = reinterpret_cast<const uint8_t*>(s_.zeros.data());
      } else {
        const int64_t row = side.row(slots[c], work_.kv_head);
        rows.data[c] = static_cast<const uint8_t*>(side.data) + row * row_bytes;
        if (side.type == kKVInt8) rows.scales[c] = f16_one(side.scales[row]);
      }
    }
  }

  void score(const int64_t* slots) {
    const KVSide side = key_side(call_.pages);
    const bool keys_in_place = s_.key_rows.in_place, values_in_place = s_.value_rows.in_place;
    const int64_t key_bytes = side.dim * element_bytes(side.type);
    const int64_t value_bytes = call_.pages.v_dim * element_bytes(call_.pages.value_type);
    visit_type(s_.key_rows.type, [&](auto type) {
      for (int64_t c = columns_.first; c < columns_.last; c += 4) {
        for (int64_t i = c; i < c + 4; ++i) {
          if (keys_in_place && slots[i + kAhead] >= 0) {
            prefetch(static_cast<const uint8_t*>(side.data) +
                         side.row(slots[i + kAhead], work_.kv_head) * key_bytes, key_bytes);
          }
          if (values_in_place) prefetch(s_.value_rows.data[i], value_bytes);
        }
        dot_rows<type.value>(s_.q.data(), rows_, k_dim_, s_.key_rows, c, s_.scores.data());
      }
    });
  }

  static void prefetch(const uint8_t* row, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
  }

  // The weights of row m: scores become e^(score - peak), with their sum. False where the row sees no key.
  bool soften(int64_t m, int64_t tile, bool holes, const int64_t* slots) {
    float* scores = s_.scores.data() + m * kTileKeys;
    const int64_t position = call_.rows.positions[work_.first_row + m / group_] - tile * kTileKeys;
    const int64_t newest = std::min(columns_.last, position + 1);
    const int64_t oldest = call_.window > 0 ? std::max(columns_.first, position - call_.window + 1) : columns_.first;
    if (call_.softcap > 0.0f) {
      for (int64_t c = columns_.first; c < columns_.last; c += kLanes) {
        store(scores + c, soft_cap(load(scores + c), call_.softcap));
      }
    }
    bool sees = newest > oldest;
    if (sees && holes) {
      sees = false;
      for (int64_t c = oldest; c < newest; ++c) {
        if (slots[c] < 0) scores[c] = kMinusInfinity;
        else sees = true;
      }
    }
    if (!sees) {
      std::fill(scores + columns_.first, scores + columns_.last, 0.0f);
      s_.tile_peaks[m] = kMinusInfinity;
      s_.tile_totals[m] = 0.0f;
      return false;
    }
    for (int64_t c = columns_.first; c < oldest; ++c) scores[c] = kMinusInfinity;
    for (int64_t c = newest; c < columns_.last; ++c) scores[c] = kMinusInfinity;
    F32 peaks = splat(kMinusInfinity);
    for (int64_t c = columns_.first; c < columns_.last; c += kLanes) peaks = max(peaks, load(scores + c));
    float peak = max_lanes(peaks);
    // Scores of -infinity alone weigh nothing, but -inf - -inf would be NaN. The row still counts as seen.
    if (!(peak > kMinusInfinity)) peak = std::numeric_limits<float>::lowest();
    F32 sums = zero();
    for (int64_t c = columns_.first; c < columns_.last; c += kLanes) {
      const F32 weights = exp(load(scores + c) - splat(peak));
      store(scores + c, weights);
      sums = sums + weights;
    }
    s_.tile_peaks[m] = peak;
    s_.tile_totals[m] = sum_lanes(sums);
    return true;
  }

  // With which factors the sums so far and those of a tile join; a tile of which nothing is seen changes nothing.
  void merge_shares(const float* tile_peaks, const float* tile_totals) {
    for (int64_t m = 0; m < rows_; m += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, rows_ - m);
      float before[kLanes], tile[kLanes], joint[kLanes], first[kLanes], second[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        before[i] = i < count ? s_.peaks[m + i] : 0.0f;
        tile[i] = i < count ? tile_peaks[i + m] : 0.0f;
        joint[i] = tile[i] > before[i] ? tile[i] : before[i];
        if (joint[i] == kMinusInfinity) joint[i] = 0.0f;
      }
      store(first, exp(load(before) - load(joint)));
      store(second, exp(load(tile) - load(joint)));
      for (int64_t i = 0; i < count; ++i) {
        const bool seen = tile[i] != kMinusInfinity;
        s_.old_share[m + i] = seen ? first[i] : 1.0f;
        s_.new_share[m + i] = seen ? second[i] : 0.0f;
        if (!seen) continue;
        s_.peaks[m + i] = joint[i];
        s_.totals[m + i] = fma_one(tile_totals[m + i], second[i], s_.totals[m + i] * first[i]);
      }
    }
  }

  void write() {
    const int64_t dim = call_.pages.v_dim;
    for (int64_t m = 0; m < rows_; ++m) {
      const int64_t row = work_.first_row + m / group_, head = work_.kv_head * group_ + m % group_;
      const float* from = s_.weighted.data() + m * v_dim_;
      float* to = call_.out + (row * call_.heads + head) * dim;
      const float total = s_.totals[m] == 0.0f ? 1.0f : s_.totals[m];
      for (int64_t d = 0; d < dim; ++d) to[d] = from[d] / total;
    }
  }

  const AttentionCall& call_;
  const Work& work_;
  const int64_t group_, rows_, k_dim_, v_dim_;
  Scratch& s_;
  Seen columns_{0, 0};
};

// Tasks of at most `queries` queries and one key head each.
std::vector<Work> plan(const AttentionCall& call, int64_t queries) {
  std::vector<Work> works;
  for (int64_t s = 0; s < call.rows.sequences; ++s) {
    const int64_t end = call.rows.query_starts[s + 1];
    for (int64_t row = call.rows.query_starts[s]; row < end; row += queries) {
      const int64_t count = std::min(queries, end - row);
      int64_t lowest = call.rows.positions[row], highest = lowest;
      for (int64_t r = row; r < row + count; ++r) {
        lowest = std::min(lowest, call.rows.positions[r]);
        highest = std::max(highest, call.rows.positions[r]);
      }
      const int64_t oldest = call.window > 0 ? std::max<int64_t>(0, lowest - call.window + 1) : 0;
      const int64_t newest = std::min<int64_t>(highest, call.tables.key_lengths[s] - 1);
      const int64_t last_tile = newest < 0 ? 0 : newest / kTileKeys + 1;
      const int64_t first_tile = std::min(oldest / kTileKeys, last_tile);
      for (int64_t h = 0; h < call.pages.kv_heads; ++h) {
        works.push_back({s, row, count, h, first_tile, last_tile, nullptr});
      }
    }
  }
  return works;
}

}  // namespace

void paged_attention(Pool& pool, const AttentionCall& call) {
  const int64_t behind = call.rows.query_starts[call.rows.sequences], width = call.heads * call.pages.v_dim;
  std::fill(call.out, call.out + call.rows.query_starts[0] * width, 0.0f);
  std::fill(call.out + behind * width, call.out + call.rows.tokens * width, 0.0f);
  int64_t queries = std::max<int64_t>(1, kMaxRows / (call.heads / call.pages.kv_heads));
  std::vector<Work> works = plan(call, queries);
  const int64_t wanted = 4 * pool.threads();
  std::vector<Split> splits;
  static thread_local std::vector<float> parts;
  int64_t size = 0, tiles = 0;
  bool single = true;
  for (const Work& work : works) {
    size += Attender(call, work).part_size() * (work.last_tile - work.first_tile);
    tiles += work.last_tile - work.first_tile;
    single = single && work.queries == 1;
  }
  const bool is_idle = pool.threads() > 1 && static_cast<int64_t>(works.size()) < wanted;
  if (is_idle && !single && size > kMostParts) {
    // A part per tile and query would take more memory than may be: queries are dealt out instead.
    for (; queries > 1 && static_cast<int64_t>(works.size()) < wanted; works = plan(call, queries)) {
      queries = (queries + 1) / 2;
    }
  } else if (is_idle) {
    // Too few tasks to keep the threads busy: the tiles of one are dealt out too.
    if (static_cast<int64_t>(parts.size()) < size) parts.resize(static_cast<size_t>(size));
    const int64_t step = std::max<int64_t>(1, tiles / wanted);
    std::vector<Work> pieces;
    float* next = parts.data();
    for (const Work& work : works) {
      if (work.last_tile - work.first_tile <= step) {
        pieces.push_back(work);
        continue;
      }
      const int64_t part_size = Attender(call, work).part_size();
      splits.push_back({work, next});
      for (int64_t tile = work.first_tile; tile < work.last_tile; tile += step) {
        Work piece = work;
        piece.first_tile = tile;
        piece.last_tile = std::min(tile + step, work.last_tile);
        piece.parts = next;
        next += part_size * (piece.last_tile - tile);
        pieces.push_back(piece);
      }
    }
    works = std::move(pieces);
  }
  pool.parallel_for(static_cast<int64_t>(works.size()), [&](int64_t i) { Attender(call, works[i]).run(); });
  pool.parallel_for(static_cast<int64_t>(splits.size()), [&](int64_t i) {
    Attender(call, splits[i].whole).merge(splits[i].parts);
  });
}

}  // namespace edgellm
