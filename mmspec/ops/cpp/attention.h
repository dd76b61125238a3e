// Attention of tree nodes to a cache.

#pragma once

#include <vector>

#include "vectors.h"

extern "C" {

struct Attention {
  const float *query, *key, *value;
  const uint8_t* mask;  // null: causal, the last slots are those of the nodes
  float* read;
  float scale;
  int64_t batch, nodes, slots, heads, kv_heads, head_dim;
  int64_t query_row, query_node;  // strides in elements; heads of a query are neighbours
  int64_t key_row, key_head, key_slot;
  int64_t mask_row, mask_node;
};

}  // extern "C"

namespace {

// The scores of LANES slots.
template <int parts, class Slot>
inline floats scores_of(const float* query, const float* keys, int64_t stride, Slot slot) {
  floats products[LANES];
#pragma GCC unroll 16
  for (int64_t lane = 0; lane < LANES; lane++) {
    const float* key = keys + slot(lane) * stride;
    products[lane] = load<floats>(query) * load<floats>(key);
    for (int i = 1; i < parts; i++)
      products[lane] = fma(load<floats>(query + LANES * i), load<floats>(key + LANES * i), products[lane]);
  }
  return sums(products);
}

// read += the values of some slots, each times its share, in order.
template <int parts, class Slot>
inline void add_values(float* read, const float* shares, int64_t count, const float* values, int64_t stride,
                       Slot slot) {
  floats sum[parts];
  for (int i = 0; i < parts; i++) sum[i] = load<floats>(read + LANES * i);
  for (int64_t j = 0; j < count; j++) {
    const float* value = values + slot(j) * stride;
    for (int i = 0; i < parts; i++) sum[i] = fma(splat(shares[j]), load<floats>(value + LANES * i), sum[i]);
  }
  for (int i = 0; i < parts; i++) store(read + LANES * i, sum[i]);
}

// Scores to softmax weights, in whole vectors; what is beyond ``count`` becomes 0. Returns the inverse of their sum.
inline float exponentials(float* scores, int64_t count) {
  floats most = splat(-INFINITY), total{};
  for (int64_t j = 0; j < count; j += LANES) {
    floats x = load<floats>(scores + j);
    x = lanes() < int32_t(count - j) ? x : splat(-INFINITY);
    store(scores + j, x);
    most = x > most ? x : most;
  }
  floats top = splat(greatest(most));
  for (int64_t j = 0; j < count; j += LANES) {
    floats x = load<floats>(scores + j), share = exponential(x - top);
    share = x == -INFINITY ? floats{} : share;
    store(scores + j, share);
    total += share;
  }
  float whole = sum(total);
  return whole > 0 ? 1 / whole : 0;  // a node without slots, such as padding, reads 0
}

struct AttentionScratch {
  std::vector<int32_t> slots;
  std::vector<float> scores, inverse;
};

// Attention of up to NODES nodes' heads that share a key head. Slots that all these nodes attend to are read once, in
// tiles of LANES; then come the others of each node. So the sums of a node run over its slots in order.
constexpr int64_t NODES = 4;

template <int parts>
void attend(const Attention& a, int64_t row, int64_t kv, int64_t first, AttentionScratch& scratch) {
  int64_t group = a.heads / a.kv_heads, nodes = std::min(NODES, a.nodes - first), queries = nodes * group;
  const uint8_t* mask = a.mask ? a.mask + row * a.mask_row + first * a.mask_node : nullptr;
  int64_t shared = mask ? a.slots : a.slots - a.nodes + first + 1;
  for (int64_t node = 0; mask && node < nodes; node++) {
    const void* hole = std::memchr(mask + node * a.mask_node, 0, shared);
    if (hole) shared = static_cast<const uint8_t*>(hole) - (mask + node * a.mask_node);
  }
  shared -= shared % LANES;
  int64_t width = (a.slots + 2 * LANES) / LANES * LANES, rest[NODES];
  if (scratch.scores.size() < size_t(queries * width)) scratch.scores.resize(queries * width);
  if (scratch.slots.size() < size_t(nodes * width)) scratch.slots.resize(nodes * width);
  for (int64_t node = 0; node < nodes; node++) {
    int32_t* slots = scratch.slots.data() + node * width;
    int64_t count = 0, end = mask ? a.slots : a.slots - a.nodes + first + node + 1;
    for (int64_t slot = shared; slot < end; slot++) {
      slots[count] = int32_t(slot);
      count += mask ? mask[node * a.mask_node + slot] : 1;
    }
    std::fill_n(slots + count, LANES, 0);  // whole vectors are read
    rest[node] = count;
  }
  const float* keys = a.key + row * a.key_row + kv * a.key_head;
  const float* values = a.value + row * a.key_row + kv * a.key_head;
  auto node_of = [&](int64_t query) { return query / group; };
  auto head_of = [&](int64_t query) { return kv * group + query % group; };
  auto query_of = [&](int64_t query) {
    return a.query + row * a.query_row + (first + node_of(query)) * a.query_node + head_of(query) * a.head_dim;
  };
  auto read_of = [&](int64_t query) {
    return a.read + ((row * a.nodes + first + node_of(query)) * a.heads + head_of(query)) * a.head_dim;
  };
  auto scores = [&](int64_t query) { return scratch.scores.data() + query * width; };
  floats scale = splat(a.scale);
  for (int64_t j = 0; j < shared; j += LANES)
    for (int64_t query = 0; query < queries; query++) {
      auto slot = [j](int64_t lane) { return j + lane; };
      store(scores(query) + j, scores_of<parts>(query_of(query), keys, a.key_slot, slot) * scale);
    }
  scratch.inverse.resize(queries);
  for (int64_t query = 0; query < queries; query++) {
    const int32_t* slots = scratch.slots.data() + node_of(query) * width;
    for (int64_t j = 0; j < rest[node_of(query)]; j += LANES) {
      auto slot = [slots, j](int64_t lane) { return int64_t(slots[j + lane]); };
      store(scores(query) + shared + j, scores_of<parts>(query_of(query), keys, a.key_slot, slot) * scale);
    }
    scratch.inverse[query] = exponentials(scores(query), shared + rest[node_of(query)]);
    std::fill_n(read_of(query), a.head_dim, 0.0f);
  }
  for (int64_t j = 0; j < shared; j += LANES)
    for (int64_t query = 0; query < queries; query++)
      add_values<parts>(read_of(query), scores(query) + j, LANES, values, a.key_slot,
                        [j](int64_t lane) { return j + lane; });
  for (int64_t query = 0; query < queries; query++) {
    const int32_t* slots = scratch.slots.data() + node_of(query) * width;
    float* read = read_of(query);
    add_values<parts>(read, scores(query) + shared, rest[node_of(query)], values, a.key_slot,
                      [slots](int64_t j) { return int64_t(slots[j]); });
    for (int i = 0; i < parts; i++) store(read + LANES * i, load<floats>(read + LANES * i) * scratch.inverse[query]);
  }
}

template <int parts>
void attend_all(const Attention& a, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    AttentionScratch scratch;
#pragma omp for schedule(dynamic) collapse(3)
    for (int64_t row = 0; row < a.batch; row++)
      for (int64_t first = 0; first < a.nodes; first += NODES)
        for (int64_t kv = 0; kv < a.kv_heads; kv++) attend<parts>(a, row, kv, first, scratch);
  }
}

}  // namespace
