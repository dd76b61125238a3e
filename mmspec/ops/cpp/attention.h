// Attention of tree nodes to a bfloat16 cache.
//
// A node's slots are processed in order, in blocks of SLOTS: scores, online softmax (FlashAttention, arXiv 2205.14135),
// weighted sum of values. So the result depends on these slots only. Blocks shared by several nodes are read and
// transposed once. Queries and softmax weights are also rounded to bfloat16: both products are dot products of pairs.

#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

#include "pairs.h"
#include "pool.h"
#include "tile_attention.h"

extern "C" {

struct Attention {
  const float* query;
  const uint16_t *key, *value;  // bfloat16
  const uint8_t* mask;          // null: causal, with the nodes in the last slots
  const float* sinks;           // (heads), scores without values; null: none
  float* read;
  float scale;
  int64_t batch, nodes, slots, heads, kv_heads, head_dim;
  int64_t query_row, query_node, query_head;  // strides in elements
  int64_t key_row, key_head, key_slot;
  int64_t mask_row, mask_node;
};

}  // extern "C"

namespace {

constexpr int64_t SLOTS = 64;             // slots per block
constexpr int64_t QUERIES = 48;           // maximum queries per read of a block, at least one node's
constexpr int64_t WIDE = LANES / 4;       // vectors of a register block
constexpr int64_t TILES = SLOTS / LANES;  // vectors of a block's scores
constexpr int64_t SUMS = 2 * LANES - 8;   // of the vector registers, others have operands
constexpr float LOG2E = 1.44269504f;      // softmax weights are powers of two
constexpr int64_t KEY_LINES = LANES / 8 + LANES / 16;  // of the next block, prefetched per 8 features of a tile

// sums (queries, wide) += the products of pairs of ``left`` (pairs, wide), in vectors, and ``right`` (queries, pairs).
template <int queries, int64_t wide>
inline void add_products(const words* left, int64_t left_stride, const uint16_t* right, int64_t right_stride,
                         int64_t pairs, float* sums, int64_t sums_stride) {
  floats sum[queries][wide];
  for (int query = 0; query < queries; query++)
    for (int64_t i = 0; i < wide; i++) sum[query][i] = load<floats>(sums + query * sums_stride + i * LANES);
  for (int64_t pair = 0; pair < pairs; pair++) {
#pragma GCC unroll 4
    for (int query = 0; query < queries; query++) {
      words other = load<uint32_t>(right + query * right_stride + 2 * pair) - words{};
#pragma GCC unroll 4
      for (int64_t i = 0; i < wide; i++) sum[query][i] = dot(sum[query][i], left[pair * left_stride + i], other);
    }
  }
  for (int query = 0; query < queries; query++)
    for (int64_t i = 0; i < wide; i++) store(sums + query * sums_stride + i * LANES, sum[query][i]);
}

// ``add_products`` for any number of queries and an even number of vectors.
inline void add_all_products(const words* left, int64_t vectors, const uint16_t* right, int64_t right_stride,
                             int64_t pairs, float* sums, int64_t queries) {
  int64_t stride = vectors * LANES;
  auto add = [&](auto block, auto wide, int64_t query, int64_t first) {
    add_products<block(), wide()>(left + first, vectors, right + query * right_stride, right_stride, pairs,
                                  sums + query * stride + first * LANES, stride);
  };
  auto add_wide = [&](auto wide, int64_t first) {
    int64_t query = 0;
    for (; query + 4 <= queries; query += 4) add(std::integral_constant<int, 4>(), wide, query, first);
    switch (queries - query) {
      case 3: return add(std::integral_constant<int, 3>(), wide, query, first);
      case 2: return add(std::integral_constant<int, 2>(), wide, query, first);
      case 1: return add(std::integral_constant<int, 1>(), wide, query, first);
    }
  };
  int64_t first = 0;
  for (; first + WIDE <= vectors; first += WIDE) add_wide(std::integral_constant<int64_t, WIDE>(), first);
  for (; first < vectors; first += 2) add_wide(std::integral_constant<int64_t, 2>(), first);
}

// Per-thread scratch for the query heads of some nodes that share a key head.
struct Reading {
  std::vector<words> keys, values;       // a block: (pairs of features, TILES), (pairs of slots, vectors of features)
  std::vector<uint16_t> query, shares;   // (queries, features), (queries, SLOTS): bfloat16
  std::vector<float> scores, read, top;  // (queries, SLOTS), (queries, features), (queries)
  std::vector<floats> total;             // (queries)
  std::vector<int32_t> own;              // (nodes, slots): slots after the shared blocks
  std::vector<int64_t> counts;           // (nodes): number of slots attended by each node
  int64_t features, vectors;             // per head, padded
  AttentionTiles* tiles;

  void shape(int64_t queries, int64_t nodes, const Attention& a) {
    features = (a.head_dim + PAIRED - 1) / PAIRED * PAIRED, vectors = features / LANES;
    keys.resize(features / 2 * TILES), values.resize(SLOTS / 2 * vectors);
    query.assign(queries * features, 0), shares.resize(queries * SLOTS), scores.resize(queries * SLOTS);
    read.assign(queries * features, 0), top.assign(queries, -INFINITY), total.assign(queries, floats{});
    counts.resize(nodes);
  }

  // Adds a score without a value.
  void start(int64_t index, float score) { top[index] = score, total[index][0] = 1; }

  // The next 8 features of a tile's keys, in pairs of features with a slot per lane.
  static void take_key_tile(const uint16_t* const* rows, int64_t feature, words (&to)[4]) {
    words part[4];
    for (int64_t i = 0; i < 4; i++) part[i] = load_eights(rows + i, feature);
    auto [a, b] = interleaved<1>(part[0], part[1], std::make_index_sequence<LANES>());
    auto [c, d] = interleaved<1>(part[2], part[3], std::make_index_sequence<LANES>());
    std::tie(to[0], to[1]) = interleaved<2>(a, c, std::make_index_sequence<LANES>());
    std::tie(to[2], to[3]) = interleaved<2>(b, d, std::make_index_sequence<LANES>());
  }

  // The next PAIRED features of the values of two slots, in pairs of slots.
  static std::pair<words, words> take_value_pair(const uint16_t* const* rows, int64_t feature, int64_t head_dim) {
    auto [low, high] = interleaved<1>(load_features(rows[0] + feature, head_dim - feature),
                                      load_features(rows[1] + feature, head_dim - feature),
                                      std::make_index_sequence<PAIRED>());
    return {reinterpret_cast<words>(low), reinterpret_cast<words>(high)};
  }

  // Transposes the keys of a block.
  void take_keys(const uint16_t* const* rows, int64_t head_dim, const uint16_t* next) {
    for (int64_t tile = 0; tile < TILES; tile++)
      for (int64_t feature = 0; feature < head_dim; feature += 8) {
        prefetch(next + (tile * head_dim + feature) / 8 * KEY_LINES * LINE, KEY_LINES);
        words part[4];
        take_key_tile(rows + tile * LANES, feature, part);
        for (int64_t i = 0; i < 4; i++) keys[(feature / 2 + i) * TILES + tile] = part[i];
      }
  }

  // Transposes the values of a block.
  void take_values(const uint16_t* const* rows, int64_t head_dim, const uint16_t* next) {
    for (int64_t i = 0; i < SLOTS; i += 2)
      for (int64_t feature = 0; feature < features; feature += PAIRED) {
        prefetch(next + i / 2 * features + feature, 1);
        words* to = values.data() + i / 2 * vectors + feature / LANES;
        std::tie(to[0], to[1]) = take_value_pair(rows + i, feature, head_dim);
      }
  }

  // Products with the keys of a block, transposed in registers: same sums as ``add_all_products`` for few queries.
  template <int queries>
  void score(const uint16_t* const* rows, int64_t head_dim, const uint16_t* next, int64_t first) {
    constexpr int64_t wide = 2 * queries <= SUMS ? 2 : 1;  // tiles
    const uint16_t* query = this->query.data() + first * features;
    for (int64_t tile = 0; tile < TILES; tile += wide) {
      floats sum[wide][queries] = {};
      for (int64_t feature = 0; feature < head_dim; feature += 8)
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) {
          prefetch(next + (tile * head_dim / 8 + feature / 8 * wide + i) * KEY_LINES * LINE, KEY_LINES);
          words part[4];
          take_key_tile(rows + (tile + i) * LANES, feature, part);
#pragma GCC unroll 4
          for (int64_t pair = 0; pair < 4; pair++)
#pragma GCC unroll 8
            for (int64_t j = 0; j < queries; j++) {
              words other = load<uint32_t>(query + j * features + feature + 2 * pair) - words{};
              sum[i][j] = dot(sum[i][j], part[pair], other);
            }
        }
      for (int64_t i = 0; i < wide; i++)
        for (int64_t j = 0; j < queries; j++)
          store(scores.data() + (first + j) * SLOTS + (tile + i) * LANES, sum[i][j]);
    }
  }

  // Weighted sums of the values of a block, likewise.
  template <int queries>
  void sum_values(const uint16_t* const* rows, int64_t head_dim, const uint16_t* next, int64_t first) {
    const uint16_t* share = shares.data() + first * SLOTS;
    float* to = read.data() + first * features;
    auto add = [&](auto wide, int64_t start) {
      floats sum[wide][2][queries];
      for (int64_t i = 0; i < 2 * wide; i++)
        for (int64_t j = 0; j < queries; j++)
          sum[i / 2][i % 2][j] = load<floats>(to + j * features + start + i * LANES);
      for (int64_t slot = 0; slot < SLOTS; slot += 2) {
        for (int64_t i = 0; i < wide; i++) {
          prefetch(next + start * SLOTS / 2 + (slot / 2 * wide + i) * PAIRED, 1);
          auto [low, high] = take_value_pair(rows + slot, start + i * PAIRED, head_dim);
#pragma GCC unroll 8
          for (int64_t j = 0; j < queries; j++) {
            words other = load<uint32_t>(share + j * SLOTS + slot) - words{};
            sum[i][0][j] = dot(sum[i][0][j], low, other), sum[i][1][j] = dot(sum[i][1][j], high, other);
          }
        }
      }
      for (int64_t i = 0; i < 2 * wide; i++)
        for (int64_t j = 0; j < queries; j++)
          store(to + j * features + start + i * LANES, sum[i / 2][i % 2][j]);
    };
    constexpr int64_t wide = 4 * queries <= SUMS ? 2 : 1;
    int64_t start = 0;
    for (; start + wide * PAIRED <= features; start += wide * PAIRED)
      add(std::integral_constant<int64_t, wide>(), start);
    for (; start < features; start += PAIRED) add(std::integral_constant<int64_t, 1>(), start);
  }

  template <class... T>
  void add_block(const words* left, int64_t count, const uint16_t* right, int64_t stride, int64_t pairs, T... rest) {
    if (has_tiles && pairs % 16 == 0)
      tiles->add(left, count, right, stride, pairs, rest...);
    else
      add_all_products(left, count, right, stride, pairs, rest...);
  }

  // Converts a query's scores in a block to softmax weights; only the first ``count`` slots are attended.
  void weigh(int64_t index, int64_t count) {
    uint16_t* share = shares.data() + index * SLOTS;
    if (count <= 0) return std::fill_n(share, SLOTS, 0), void();
    floats score[TILES], most = splat(-INFINITY);
    for (int64_t i = 0; i < TILES; i++) {
      score[i] = load<floats>(scores.data() + index * SLOTS + i * LANES);
      if (count < SLOTS) score[i] = lanes() < int32_t(count - i * LANES) ? score[i] : splat(-INFINITY);
      most = score[i] > most ? score[i] : most;
    }
    if (greater(most, splat(top[index]))) {
      float greatest_score = greatest(most);
      floats factor = power_of_two(splat(top[index]) - greatest_score);
      top[index] = greatest_score, total[index] *= factor;
      for (int64_t i = index * features; i < (index + 1) * features; i += LANES)
        store(read.data() + i, load<floats>(read.data() + i) * factor);
    }
    floats sum = total[index], highest = splat(top[index]);
    for (int64_t i = 0; i < TILES; i++) {
      halves part = to_halves(power_of_two(score[i] - highest));
      if (count < SLOTS) part = first_of(part, count - i * LANES);
      sum += reinterpret_cast<floats>(__builtin_convertvector(part, words) << 16);
      std::memcpy(share + i * LANES, &part, sizeof part);
    }
    total[index] = sum;
  }

  // Accumulates a block for ``queries`` queries from ``first`` on; count(query): number of attended slots in the block.
  template <class Count>
  void add(const Attention& a, const uint16_t* key, const uint16_t* value, const int32_t* slots, int64_t first,
           int64_t queries, const Count& count) {
    const uint16_t *key_rows[SLOTS], *value_rows[SLOTS];
    for (int64_t i = 0; i < SLOTS; i++)
      key_rows[i] = key + slots[i] * a.key_slot, value_rows[i] = value + slots[i] * a.key_slot;
    // The next block is prefetched in small steps, as bursts would leave the memory idle between them.
    const uint16_t *next_key = key_rows[0] + SLOTS * a.key_slot, *next_value = value_rows[0] + SLOTS * a.key_slot;
    int64_t half = SLOTS / 2 * a.head_dim, taken = TILES * a.head_dim / 8 * KEY_LINES * LINE;
    auto weigh_all = [&] {
      int64_t keys_left = (2 * half - taken) / LINE / queries + 1, values_left = half / LINE / queries + 1;
      for (int64_t i = 0; i < queries; i++) {
        prefetch(next_key + taken + i * keys_left * LINE, keys_left);
        prefetch(next_value + i * values_left * LINE, values_left);
        weigh(first + i, count(first + i));
      }
    };
    auto few = [&](auto queries) {
      score<queries()>(key_rows, a.head_dim, next_key, first);
      weigh_all();
      sum_values<queries()>(value_rows, a.head_dim, next_value + half, first);
    };
    if (!has_tiles) switch (queries) {
        case 1: return few(std::integral_constant<int, 1>());
        case 2: return few(std::integral_constant<int, 2>());
        case 3: return few(std::integral_constant<int, 3>());
        case 4: return few(std::integral_constant<int, 4>());
        case 5: return few(std::integral_constant<int, 5>());
        case 6: return few(std::integral_constant<int, 6>());
        case 7: return few(std::integral_constant<int, 7>());
        case 8: return few(std::integral_constant<int, 8>());
      }
    float* score = scores.data() + first * SLOTS;
    take_keys(key_rows, a.head_dim, next_key);
    std::fill_n(score, queries * SLOTS, 0.0f);
    add_block(keys.data(), TILES, query.data() + first * features, features, a.head_dim / 2, score, queries);
    weigh_all();
    take_values(value_rows, a.head_dim, next_value + half);
    add_block(values.data(), vectors, shares.data() + first * SLOTS, SLOTS, SLOTS / 2, read.data() + first * features,
              queries);
  }

  // Writes a query's output.
  void write(int64_t index, float* to, int64_t head_dim) const {
    float whole = sum(total[index]), inverse = whole > 0 ? 1 / whole : 0;  // padding without slots yields 0
    const float* from = read.data() + index * features;
    for (int64_t i = 0; i < head_dim; i += PAIRED) {
      auto [low, high] =
          in_order(load<floats>(from + i), load<floats>(from + i + LANES), std::make_index_sequence<LANES>());
      store(to + i, low * inverse);
      if (i + LANES < head_dim) store(to + i + LANES, high * inverse);
    }
  }
};

// Slots of nodes: ``common`` slots from ``begin`` on are shared by all nodes, up to each node's count.
struct Layout {
  int64_t begin, common;
};

// Computes the number of slots of each node, and its slots after the shared blocks.
inline Layout lay_out(const uint8_t* mask, int64_t stride, int64_t slots, int64_t nodes, Reading& to) {
  auto next = [&](int64_t node, int value, int64_t from) {
    const uint8_t* row = mask + node * stride;
    const void* found = from < slots ? std::memchr(row + from, value, slots - from) : nullptr;
    return found ? static_cast<const uint8_t*>(found) - row : slots;
  };
  Layout layout{slots, slots};
  for (int64_t node = 0; node < nodes; node++) layout.begin = std::min(layout.begin, int64_t(next(node, 1, 0)));
  for (int64_t node = 0; node < nodes; node++) {
    int64_t end = next(node, 0, layout.begin);
    to.counts[node] = end - layout.begin;
    if (next(node, 1, end) < slots) layout.common = std::min(layout.common, to.counts[node] / SLOTS * SLOTS);
  }
  if (layout.common == slots) return layout;
  if (to.own.size() < size_t(nodes * (slots + SLOTS))) to.own.resize(nodes * (slots + SLOTS));
  for (int64_t node = 0; node < nodes; node++) {
    int32_t* own = to.own.data() + node * (slots + SLOTS);
    int64_t count = 0;
    for (int64_t slot = layout.begin + layout.common; slot < slots; slot++) {
      own[count] = int32_t(slot);
      count += mask[node * stride + slot];
    }
    std::fill_n(own + count, SLOTS, count ? own[count - 1] : 0);  // blocks are read whole
    if (to.counts[node] >= layout.common) to.counts[node] = layout.common + count;
  }
  return layout;
}

// Attention for the query heads of some nodes that share a key head.
void attend(const Attention& a, int64_t row, int64_t kv, int64_t first, int64_t nodes, Reading& reading) {
  int64_t group = a.heads / a.kv_heads, queries = nodes * group, longest = 0;
  reading.shape(queries, nodes, a);
  Layout layout{0, a.slots};
  if (a.mask)
    layout = lay_out(a.mask + row * a.mask_row + first * a.mask_node, a.mask_node, a.slots, nodes, reading);
  for (int64_t node = 0; node < nodes; node++) {
    if (!a.mask) reading.counts[node] = a.slots - a.nodes + first + node + 1;
    longest = std::max(longest, reading.counts[node]);
    const float* query = a.query + row * a.query_row + (first + node) * a.query_node + kv * group * a.query_head;
    for (int64_t head = 0; head < group; head++) {
      float scaled[256], scale = a.scale * LOG2E;
      for (int64_t i = 0; i < a.head_dim; i++) scaled[i] = query[head * a.query_head + i] * scale;
      store_rounded(reading.query.data() + (node * group + head) * reading.features, scaled, a.head_dim);
      if (a.sinks) reading.start(node * group + head, a.sinks[kv * group + head] * LOG2E);
    }
  }
  const uint16_t *key = a.key + row * a.key_row + kv * a.key_head, *value = a.value + row * a.key_row + kv * a.key_head;
  int32_t slots[SLOTS];
  for (int64_t at = 0; at < std::min(layout.common, longest); at += SLOTS) {
    for (int64_t i = 0; i < SLOTS; i++) slots[i] = int32_t(layout.begin + std::min(at + i, longest - 1));
    reading.add(a, key, value, slots, 0, queries, [&](int64_t query) { return reading.counts[query / group] - at; });
  }
  for (int64_t node = 0; node < nodes; node++)
    for (int64_t at = layout.common; at < reading.counts[node]; at += SLOTS) {
      const int32_t* own = reading.own.data() + node * (a.slots + SLOTS) + at - layout.common;
      reading.add(a, key, value, own, node * group, group, [&](int64_t) { return reading.counts[node] - at; });
    }
  for (int64_t query = 0; query < queries; query++) {
    int64_t head = ((row * a.nodes + first + query / group) * a.kv_heads + kv) * group + query % group;
    reading.write(query, a.read + head * a.head_dim, a.head_dim);
  }
}

// Attention of nodes. Calls then(first, nodes, feature, features) with the first of some nodes, counted over all rows,
// and the first of their features that are read.
template <class Then>
void attend_all(const Attention& a, const Then& then) {
  int64_t together = std::max<int64_t>(1, QUERIES * a.kv_heads / a.heads);
  int64_t runs = (a.nodes + together - 1) / together;
  parts_of(a.batch * runs * a.kv_heads, 1, [&](int64_t begin, int64_t end) {
    thread_local Reading reading;
    AttentionTiles tiles;
    reading.tiles = &tiles;
    for (int64_t at = begin; at < end; at++) {
      int64_t kv = at % a.kv_heads, first = at / a.kv_heads % runs * together, row = at / a.kv_heads / runs;
      int64_t nodes = std::min(together, a.nodes - first), features = a.heads / a.kv_heads * a.head_dim;
      attend(a, row, kv, first, nodes, reading);
      then(row * a.nodes + first, nodes, kv * features, features);
    }
  });
}

inline void attend_all(const Attention& a) {
  attend_all(a, [](int64_t, int64_t, int64_t, int64_t) {});
}

}  // namespace
