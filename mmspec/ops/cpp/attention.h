// Attention of tree nodes to a cache of bfloat16 or int8.
//
// A node's slots are processed in order, in blocks of SLOTS: scores, online softmax (FlashAttention, arXiv 2205.14135),
// weighted sum of values. So the result depends on these slots only. Blocks shared by several nodes are read and
// transposed once. With bfloat16, queries and softmax weights are also rounded to it: both products are dot products of
// pairs.
//
// In int8, a head of a slot is codes, of keys plus 128, and their float scale. A constant is subtracted from keys,
// which changes no softmax (SageAttention, arXiv 2410.02367); keys and queries are multiplied by a Hadamard matrix, which
// spreads outliers over all features and leaves their products unchanged (QuaRot, arXiv 2404.00456). Queries are int8,
// too, and the weights of a block, times the scales of its values, 14 bits in two int8. Sums of products are integers,
// exact in any order.

#pragma once

#include <tuple>
#include <type_traits>
#include <vector>

#include "pairs.h"
#include "rows.h"
#include "tile_attention.h"

extern "C" {

struct Attention {
  const float* query;
  uint8_t *key, *value;  // in the form of ``stored``
  const float* centre;   // (kv_heads, head_dim): subtracted from keys in int8
  const uint8_t* mask;   // null: causal, with the nodes in the last slots
  const float* sinks;    // (heads), scores without values; null: none
  float* read;
  float scale;
  int64_t batch, nodes, slots, heads, kv_heads, head_dim;
  int64_t query_row, query_node, query_head;  // strides in elements
  int64_t key_row, key_head, key_slot;        // strides in bytes
  int64_t mask_row, mask_node;
  int64_t stored;  // 0: bfloat16, 1: int8
};

}  // extern "C"

namespace {

constexpr int64_t SLOTS = 64;             // slots per block
constexpr int64_t QUERIES = 48;           // maximum queries per read of a block, at least one node's
constexpr int64_t WIDE = LANES / 4;       // vectors of a register block
constexpr int64_t TILES = SLOTS / LANES;  // vectors of a block's scores
constexpr int64_t SUMS = 2 * LANES - 8;   // of the vector registers, others have operands
constexpr float LOG2E = 1.44269504f;      // softmax weights are powers of two

// Forms of keys and values. A word has IN_WORD features of a key, or a feature of the values of IN_WORD slots.
struct Halves {
  typedef floats Sums;
  static constexpr int64_t IN_WORD = 2, PLANES = 1;

  static floats dot_keys(floats sum, words left, const uint32_t* right) { return dot(sum, left, *right - words{}); }
  static floats dot_values(floats sum, words left, const uint32_t* right) { return dot(sum, left, *right - words{}); }

  // Values of IN_WORD slots, ``left`` features from ``feature`` on.
  static void take_values(const uint8_t* const* rows, int64_t feature, int64_t left, words* to) {
    auto row = [=](int64_t i) { return load_first<row_halves>(rows[i] + 2 * feature, 2 * left); };
    std::tie(to[0], to[1]) = interleaved_as<words, row_halves>(row(0), row(1));
  }
};

struct Codes {
  typedef ints Sums;
  static constexpr int64_t IN_WORD = 4, PLANES = 2;  // of 7 bits of weights

  static ints dot_keys(ints sum, words left, const uint32_t* right) {
    return dot<INT8>(sum, reinterpret_cast<bytes>(left), reinterpret_cast<const int8_t*>(right));
  }
  static ints dot_values(ints sum, words left, const uint32_t* right) {
    return dot_signed(sum, reinterpret_cast<bytes>(left), reinterpret_cast<const uint8_t*>(right));
  }

  static void take_values(const uint8_t* const* rows, int64_t feature, int64_t left, words* to) {
    bytes row[4];
    for (int64_t i = 0; i < 4; i++) row[i] = load_first<bytes>(rows[i] + feature, left);
    auto [a, b] = interleaved(row[0], row[1]);
    auto [c, d] = interleaved(row[2], row[3]);
    std::tie(to[0], to[1]) = interleaved_as<words, row_halves>(a, c);
    std::tie(to[2], to[3]) = interleaved_as<words, row_halves>(b, d);
  }
};

template <size_t step, size_t... i>
inline floats butterfly(floats x, std::index_sequence<i...>) {
  return __builtin_shufflevector(x, x, (i ^ step)...) + x * floats{(i & step ? -1.0f : 1.0f)...};
}

// Multiplies a head by a Hadamard matrix, orthonormal and symmetric; by blocks of it if the size is no power of two.
inline void mix(float* x, int64_t count) {
  constexpr auto all = std::make_index_sequence<LANES>();
  int64_t size = count & -count;
  floats factor = splat(1 / std::sqrt(float(size)));
  for (int64_t i = 0; i < count; i += LANES) {
    floats part = butterfly<4>(butterfly<2>(butterfly<1>(load<floats>(x + i) * factor, all), all), all);
    store(x + i, LANES > 8 ? butterfly<LANES / 2>(part, all) : part);
  }
  for (int64_t step = LANES; step < size; step *= 2)
    for (int64_t run = 0; run < count; run += 2 * step)
      for (int64_t i = run; i < run + step; i += LANES) {
        floats a = load<floats>(x + i), b = load<floats>(x + i + step);
        store(x + i, a + b), store(x + i + step, a - b);
      }
}

// Stores a head as int8; returns the codes' unit and sum.
inline std::pair<float, int32_t> store_codes(const float* x, int64_t count, int8_t* codes) {
  floats most{};
  for (int64_t i = 0; i < count; i += LANES) {
    floats part = load<floats>(x + i);
    part = part < 0 ? -part : part;
    most = part > most ? part : most;
  }
  float magnitude = greatest(most), inverse = magnitude > 0 ? 127 / magnitude : 0;
  int32_t total = 0;
  for (int64_t i = 0; i < count; i += 16) total += quantise(x + i, inverse, codes + i);
  return {magnitude / 127, total};
}

// Stores a head of keys or values as int8; ``centre``: subtracted from keys, null for values.
inline void store_int8(const float* from, const float* centre, int64_t head_dim, uint8_t* to) {
  float mixed[256];
  for (int64_t i = 0; i < head_dim; i++) mixed[i] = centre ? from[i] - centre[i] : from[i];
  if (centre) mix(mixed, head_dim);
  float unit = store_codes(mixed, head_dim, reinterpret_cast<int8_t*>(to)).first;
  for (int64_t i = 0; centre && i < head_dim; i++) to[i] ^= 128;
  std::memcpy(to + head_dim, &unit, sizeof unit);
}

// Stores the keys or values of a head of a node, counted over all rows, in its slot.
inline void store_slot(const Attention& a, bool is_key, int64_t row, int64_t head, const float* from) {
  int64_t slot = a.slots - a.nodes + row % a.nodes;
  uint8_t* to = (is_key ? a.key : a.value) + row / a.nodes * a.key_row + head * a.key_head + slot * a.key_slot;
  if (a.stored) return store_int8(from, is_key ? a.centre + head * a.head_dim : nullptr, a.head_dim, to);
  store_rounded(reinterpret_cast<uint16_t*>(to), from, a.head_dim);
}

// Attention of layer ``place`` of a cache (layers, 2, ...), from attention of the first layer.
inline Attention of_layer(Attention a, int64_t place) {
  int64_t first = 2 * place * (a.value - a.key);
  a.key += first, a.value += first;
  if (a.stored) a.centre += place * a.kv_heads * a.head_dim;
  return a;
}

// Keeps the compiler from loading x again for each product.
inline words in_register(words x) {
#if defined(__AVX2__)
  asm("" : "+v"(x));
#endif
  return x;
}

// sum (queries, wide) += the products of ``left`` (count, wide), in vectors, and ``right`` (queries, count).
template <int queries, int64_t wide, class Sums, class Dot>
inline void add_products(const words* left, int64_t left_stride, const uint32_t* right, int64_t right_stride,
                         int64_t count, Sums (&sum)[queries][wide], const Dot& dot) {
  for (int64_t word = 0; word < count; word++) {
    words own[wide];
#pragma GCC unroll 4
    for (int64_t i = 0; i < wide; i++) own[i] = in_register(left[word * left_stride + i]);
#pragma GCC unroll 4
    for (int query = 0; query < queries; query++)
#pragma GCC unroll 4
      for (int64_t i = 0; i < wide; i++)
        sum[query][i] = dot(sum[query][i], own[i], right + query * right_stride + word);
  }
}

// ``add_products`` for any number of queries and an even number of vectors, in blocks. Calls begin(query, vector, sum)
// and end(query, vector, sum) before and after each block.
template <class Sums, class Dot, class Begin, class End>
inline void add_all_products(const words* left, int64_t vectors, const uint32_t* right, int64_t count, int64_t queries,
                             const Dot& dot, const Begin& begin, const End& end) {
  auto add = [&](auto block, auto wide, int64_t query, int64_t first) {
    Sums sum[block()][wide()] = {};
    begin(query, first, sum);
    add_products(left + first, vectors, right + query * count, count, count, sum, dot);
    end(query, first, sum);
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

// Calls body(query, i) for all sums of a block, unrolled to keep them in registers.
template <class T, int queries, int64_t wide, class Body>
inline void each_sum(T (&)[queries][wide], const Body& body) {
#pragma GCC unroll 4
  for (int query = 0; query < queries; query++)
#pragma GCC unroll 4
    for (int64_t i = 0; i < wide; i++) body(query, i);
}

// Prefetches the next block in small steps, as bursts would leave the memory idle between them.
struct Ahead {
  const uint8_t* at;
  void operator()(int64_t lines) {
    for (int64_t i = 0; i < lines; i++, at += 64) __builtin_prefetch(at);
  }
};

// Slots of nodes: ``common`` slots from ``begin`` on are shared by all nodes, up to each node's count.
struct Layout {
  int64_t begin, common;
  std::vector<int32_t> own;     // (nodes, slots): slots after the shared blocks
  std::vector<int64_t> counts;  // (nodes): number of slots attended by each node
  // Computes the number of slots of each node, and its slots after the shared blocks.
  void take(const uint8_t* mask, int64_t stride, int64_t slots, int64_t nodes) {
    auto next = [&](int64_t node, int value, int64_t from) {
      const uint8_t* row = mask + node * stride;
      const void* found = from < slots ? std::memchr(row + from, value, slots - from) : nullptr;
      return found ? static_cast<const uint8_t*>(found) - row : slots;
    };
    begin = common = slots;
    for (int64_t node = 0; node < nodes; node++) begin = std::min(begin, int64_t(next(node, 1, 0)));
    for (int64_t node = 0; node < nodes; node++) {
      int64_t end = next(node, 0, begin);
      counts[node] = end - begin;
      if (next(node, 1, end) < slots) common = std::min(common, counts[node] / SLOTS * SLOTS);
    }
    if (common == slots) return;
    if (own.size() < size_t(nodes * (slots + SLOTS))) own.resize(nodes * (slots + SLOTS));
    for (int64_t node = 0; node < nodes; node++) {
      int32_t* to = own.data() + node * (slots + SLOTS);
      int64_t count = 0;
      for (int64_t slot = begin + common; slot < slots; slot++) {
        to[count] = int32_t(slot);
        count += mask[node * stride + slot];
      }
      std::fill_n(to + count, SLOTS, count ? to[count - 1] : 0);  // blocks are read whole
      if (counts[node] >= common) counts[node] = common + count;
    }
  }
};

// Attention, and per-thread scratch, for the query heads of some nodes that share a key head.
template <class Form>
struct Reading {
  static constexpr int64_t PLANES = Form::PLANES, IN_WORD = Form::IN_WORD;
  static constexpr bool CODED = IN_WORD == 4;
  static constexpr int64_t UNIT = IN_WORD * LANES;  // features of a value in IN_WORD vectors
  static constexpr int64_t WORDS = SLOTS / IN_WORD;
  static constexpr int64_t KEY_LINES = CODED ? 2 : LANES / 8 + LANES / 16;  // prefetched per 4 words of a tile

  std::vector<words> keys, values;       // a block: (words, TILES), (WORDS, vectors of features)
  std::vector<uint32_t> query, shares;   // (queries, words), (queries * PLANES, WORDS)
  std::vector<float> scores, read, top;  // (queries, SLOTS), (queries, features), (queries)
  std::vector<floats> total;             // (queries)
  Layout layout;
  int64_t head_dim, features, vectors, words_of;  // per head: features padded
  AttentionTiles* tiles;
  std::vector<float> query_unit, share_unit;       // of codes, per query
  std::vector<int32_t> query_start;                // subtracted from sums of codes
  float key_unit[SLOTS], value_unit[SLOTS], value_most;  // units of codes, the greatest of values

  void shape(int64_t queries, int64_t nodes, const Attention& a) {
    head_dim = a.head_dim, features = (head_dim + UNIT - 1) / UNIT * UNIT, vectors = features / LANES;
    words_of = head_dim / IN_WORD;
    keys.resize(words_of * TILES), values.resize(WORDS * vectors);
    query.resize(queries * words_of), shares.resize(queries * PLANES * WORDS), scores.resize(queries * SLOTS);
    read.assign(queries * features, 0), top.assign(queries, -INFINITY), total.assign(queries, floats{});
    layout.counts.resize(nodes);
    for (auto* of : {&query_unit, &share_unit}) of->resize(queries);
    query_start.resize(queries);
  }

  // Adds a score without a value.
  void start(int64_t index, float score) { top[index] = score, total[index][0] = 1; }

  void take_query(int64_t index, const float* from, float scale) {
    float scaled[256];
    uint32_t* to = query.data() + index * words_of;
    for (int64_t i = 0; i < head_dim; i++) scaled[i] = from[i] * scale;
    if (!CODED) return store_rounded(reinterpret_cast<uint16_t*>(to), scaled, head_dim);
    mix(scaled, head_dim);
    std::tie(query_unit[index], query_start[index]) = store_codes(scaled, head_dim, reinterpret_cast<int8_t*>(to));
    query_start[index] *= VNNI ? 128 : 0;
  }

  // The next 4 words of a tile's keys, with a slot per lane.
  static void take_key_tile(const uint8_t* const* rows, int64_t word, words (&to)[4]) {
    words part[4];
    for (int64_t i = 0; i < 4; i++) part[i] = load_quarters(rows + i, 4 * word);
    auto [a, b] = interleaved(part[0], part[1]);
    auto [c, d] = interleaved(part[2], part[3]);
    std::tie(to[0], to[1]) = interleaved_as<words, longs>(a, c);
    std::tie(to[2], to[3]) = interleaved_as<words, longs>(b, d);
  }

  // Transposes the keys of a block.
  void take_keys(const uint8_t* const* rows, Ahead& ahead) {
    for (int64_t tile = 0; tile < TILES; tile++)
      for (int64_t word = 0; word < words_of; word += 4) {
        ahead(KEY_LINES);
        words part[4];
        take_key_tile(rows + tile * LANES, word, part);
        for (int64_t i = 0; i < 4; i++) keys[(word + i) * TILES + tile] = part[i];
      }
  }

  // Transposes the values of a block.
  void take_values(const uint8_t* const* rows, Ahead& ahead) {
    for (int64_t word = 0; word < WORDS; word++)
      for (int64_t feature = 0; feature < features; feature += UNIT) {
        ahead(1);
        Form::take_values(rows + word * IN_WORD, feature, head_dim - feature,
                          &values[word * vectors + feature / LANES]);
      }
  }

  // Products with the keys of a block, transposed in registers: same sums as ``add_all_products`` for few queries.
  template <int queries>
  void score(const uint8_t* const* rows, Ahead& ahead, int64_t first) {
    constexpr int64_t wide = 2 * queries <= SUMS ? 2 : 1;  // tiles
    for (int64_t tile = 0; tile < TILES; tile += wide) {
      floats sum[wide][queries] = {};
      for (int64_t word = 0; word < words_of; word += 4)
#pragma GCC unroll 4
        for (int64_t i = 0; i < wide; i++) {
          ahead(KEY_LINES);
          words part[4];
          take_key_tile(rows + (tile + i) * LANES, word, part);
#pragma GCC unroll 4
          for (int64_t at = 0; at < 4; at++)
#pragma GCC unroll 8
            for (int64_t j = 0; j < queries; j++)
              sum[i][j] = Form::dot_keys(sum[i][j], part[at], &query[(first + j) * words_of + word + at]);
        }
      for (int64_t i = 0; i < wide; i++)
        for (int64_t j = 0; j < queries; j++)
          store(scores.data() + (first + j) * SLOTS + (tile + i) * LANES, sum[i][j]);
    }
  }

  // Weighted sums of the values of a block, likewise.
  template <int queries>
  void sum_values(const uint8_t* const* rows, Ahead& ahead, int64_t first) {
    float* to = read.data() + first * features;
    auto add = [&](auto wide, int64_t start) {
      floats sum[wide][2][queries];
      for (int64_t i = 0; i < 2 * wide; i++)
        for (int64_t j = 0; j < queries; j++)
          sum[i / 2][i % 2][j] = load<floats>(to + j * features + start + i * LANES);
      for (int64_t word = 0; word < WORDS; word++) {
        for (int64_t i = 0; i < wide; i++) {
          ahead(1);
          words part[2];
          Form::take_values(rows + 2 * word, start + i * UNIT, head_dim - start - i * UNIT, part);
#pragma GCC unroll 8
          for (int64_t j = 0; j < queries; j++)
            for (int64_t half = 0; half < 2; half++)
              sum[i][half][j] = Form::dot_values(sum[i][half][j], part[half], &shares[(first + j) * WORDS + word]);
        }
      }
      for (int64_t i = 0; i < 2 * wide; i++)
        for (int64_t j = 0; j < queries; j++)
          store(to + j * features + start + i * LANES, sum[i / 2][i % 2][j]);
    };
    constexpr int64_t wide = 4 * queries <= SUMS ? 2 : 1;
    int64_t start = 0;
    for (; start + wide * UNIT <= features; start += wide * UNIT) add(std::integral_constant<int64_t, wide>(), start);
    for (; start < features; start += UNIT) add(std::integral_constant<int64_t, 1>(), start);
  }

  // Products with the keys of a block.
  void add_keys(int64_t first, int64_t queries) {
    const uint32_t* from = query.data() + first * words_of;
    float* to = scores.data() + first * SLOTS;
    if (!CODED && has_tiles && words_of % 16 == 0) {
      std::fill_n(to, queries * SLOTS, 0.0f);
      return tiles->add(keys.data(), TILES, halves_of(from), 2 * words_of, words_of, to, queries);
    }
    add_all_products<typename Form::Sums>(
        keys.data(), TILES, from, words_of, queries, dot_keys, [](auto...) {},
        [&](int64_t query, int64_t tile, auto& sum) {
          each_sum(sum, [&](int j, int64_t i) {
            std::memcpy(to + (query + j) * SLOTS + (tile + i) * LANES, &sum[j][i], sizeof sum[j][i]);
          });
        });
  }

  // Weighted sums of the values of a block.
  void add_values(int64_t first, int64_t queries) {
    const uint32_t* from = shares.data() + first * PLANES * WORDS;
    float* to = read.data() + first * features;
    if constexpr (CODED) {
      add_all_products<ints>(
          values.data(), vectors, from, WORDS, queries * PLANES, dot_values, [](auto...) {},
          [&](int64_t row, int64_t vector, auto& sum) {
            each_sum(sum, [&](int j, int64_t i) {
              if (j % PLANES) return;
              float* at = to + (row + j) / PLANES * features + (vector + i) * LANES;
              floats unit = splat(share_unit[first + (row + j) / PLANES]);
              ints whole = PLANES == 1 ? sum[j][i] : sum[j][i] * 128 + sum[j + PLANES - 1][i];
              store(at, fma(__builtin_convertvector(whole, floats), unit, load<floats>(at)));
            });
          });
    } else if (has_tiles) {
      tiles->add(values.data(), vectors, halves_of(from), SLOTS, WORDS, to, queries);
    } else {
      auto at = [&](int64_t query, int64_t vector) { return to + query * features + vector * LANES; };
      add_all_products<floats>(
          values.data(), vectors, from, WORDS, queries, dot_values,
          [&](int64_t query, int64_t vector, auto& sum) {
            each_sum(sum, [&](int j, int64_t i) { sum[j][i] = load<floats>(at(query + j, vector + i)); });
          },
          [&](int64_t query, int64_t vector, auto& sum) {
            each_sum(sum, [&](int j, int64_t i) { store(at(query + j, vector + i), sum[j][i]); });
          });
    }
  }

  static constexpr auto dot_keys = [](auto... of) { return Form::dot_keys(of...); };
  static constexpr auto dot_values = [](auto... of) { return Form::dot_values(of...); };

  static const uint16_t* halves_of(const uint32_t* from) { return reinterpret_cast<const uint16_t*>(from); }

  floats score_of(int64_t index, int64_t tile) const {
    const float* from = scores.data() + index * SLOTS + tile * LANES;
    if (!CODED) return load<floats>(from);
    floats sum = __builtin_convertvector(load<ints>(from) - query_start[index], floats);
    return sum * query_unit[index] * load<floats>(key_unit + tile * LANES);
  }

  // Converts a query's scores in a block to softmax weights; only the first ``count`` slots are attended.
  void weigh(int64_t index, int64_t count) {
    uint32_t* share = shares.data() + index * PLANES * WORDS;
    if (count <= 0) return share_unit[index] = 0, std::fill_n(share, PLANES * WORDS, 0), void();
    auto known = [&](floats x, int64_t tile, float other) {
      return count < SLOTS ? lanes() < int32_t(count - tile * LANES) ? x : splat(other) : x;
    };
    floats score[TILES], most = splat(-INFINITY);
    for (int64_t i = 0; i < TILES; i++) {
      score[i] = known(score_of(index, i), i, -INFINITY);
      most = score[i] > most ? score[i] : most;
    }
    float greatest_score = CODED || greater(most, splat(top[index])) ? greatest(most) : top[index];
    if (greatest_score > top[index]) {
      floats factor = power_of_two(splat(top[index] - greatest_score));
      top[index] = greatest_score, total[index] *= factor;
      for (int64_t i = index * features; i < (index + 1) * features; i += LANES)
        store(read.data() + i, load<floats>(read.data() + i) * factor);
    }
    if constexpr (CODED) return code(index, count, score, greatest_score, known);
    floats sum = total[index], highest = splat(top[index]);
    for (int64_t i = 0; i < TILES; i++) {
      halves part = to_halves(known(power_of_two(score[i] - highest), i, 0));
      sum += reinterpret_cast<floats>(__builtin_convertvector(part, words) << 16);
      std::memcpy(share + i * LANES / 2, &part, sizeof part);
    }
    total[index] = sum;
  }

  // The greatest unit of the first ``count`` slots' values.
  float greatest_unit(int64_t count) const {
    floats most{};
    for (int64_t i = 0; i < TILES; i++) {
      floats part = load<floats>(value_unit + i * LANES);
      most = (lanes() < int32_t(count - i * LANES)) & (part > most) ? part : most;
    }
    return greatest(most);
  }

  // Stores the weights of a block's values as codes. They depend on nothing but the attended slots.
  template <class Known>
  void code(int64_t index, int64_t count, const floats (&score)[TILES], float greatest_score, const Known& known) {
    constexpr float most_code = (1 << 7 * PLANES) - 1;
    typedef uint8_t quarter __attribute__((vector_size(LANES)));
    uint8_t* share = reinterpret_cast<uint8_t*>(shares.data() + index * PLANES * WORDS);
    floats sum{}, highest = splat(greatest_score), of_top = power_of_two(splat(greatest_score - top[index]));
    float most = count < SLOTS ? greatest_unit(count) : value_most, inverse = most > 0 ? most_code / most : 0;
    for (int64_t i = 0; i < TILES; i++) {
      floats weight = known(power_of_two(score[i] - highest), i, 0);
      floats scaled = known(weight * load<floats>(value_unit + i * LANES) * inverse, i, 0);
      ints whole = reinterpret_cast<ints>(scaled + OFFSET) - 0x4b400000;
      for (int64_t plane = 0; plane < PLANES; plane++) {
        quarter part = __builtin_convertvector((whole >> (7 * (PLANES - 1 - plane))) & 127, quarter);
        std::memcpy(share + plane * SLOTS + i * LANES, &part, LANES);
      }
      sum += weight;
    }
    total[index] += sum * of_top, share_unit[index] = most / most_code * of_top[0];
  }

  // Accumulates a block for ``queries`` queries from ``first`` on; count(query): number of attended slots in the block.
  template <class Count>
  void add(const Attention& a, const uint8_t* key, const uint8_t* value, const int32_t* slots, int64_t first,
           int64_t queries, const Count& count) {
    const uint8_t *key_rows[SLOTS], *value_rows[SLOTS];
    const int64_t slot = a.key_slot, head_dim = a.head_dim;  // copies in registers
    for (int64_t i = 0; i < SLOTS; i++) {
      key_rows[i] = key + slots[i] * slot, value_rows[i] = value + slots[i] * slot;
      if (CODED) std::memcpy(key_unit + i, key_rows[i] + head_dim, 4);
      if (CODED) std::memcpy(value_unit + i, value_rows[i] + head_dim, 4);
    }
    if (CODED) value_most = greatest_unit(SLOTS);
    int64_t lines = SLOTS * slot / 64 + CODED, of_keys = TILES * words_of / 4 * KEY_LINES;
    Ahead next_key{key_rows[0] + SLOTS * slot}, next_value{value_rows[0] + SLOTS * slot};
    auto weigh_all = [&] {
      int64_t keys_left = (lines - of_keys) / queries + 1;
      int64_t values_left = (lines - WORDS * features / UNIT) / queries + 1;
      for (int64_t i = 0; i < queries; i++) {
        next_key(keys_left), next_value(values_left);
        weigh(first + i, count(first + i));
      }
    };
    auto few = [&](auto queries) {
      score<queries()>(key_rows, next_key, first);
      weigh_all();
      sum_values<queries()>(value_rows, next_value, first);
    };
    if constexpr (!CODED)
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
    take_keys(key_rows, next_key);
    add_keys(first, queries);
    weigh_all();
    take_values(value_rows, next_value);
    add_values(first, queries);
  }

  // Writes a query's output.
  void write(int64_t index, float* to) const {
    float whole = sum(total[index]), inverse = whole > 0 ? 1 / whole : 0;  // padding without slots yields 0
    constexpr int64_t run = 4 * IN_WORD;  // features of the same 128 bits
    for (int64_t i = 0; i < head_dim; i += 4) {
      const float* from = &read[index * features + i / UNIT * UNIT + i % UNIT / run * 4 + i % run / 4 * LANES];
      for (int64_t j = 0; j < 4; j++) to[i + j] = from[j] * inverse;
    }
  }

  void attend(const Attention& a, int64_t row, int64_t kv, int64_t first, int64_t nodes) {
    int64_t group = a.heads / a.kv_heads, queries = nodes * group, longest = 0;
    shape(queries, nodes, a);
    layout.begin = 0, layout.common = a.slots;
    if (a.mask) layout.take(a.mask + row * a.mask_row + first * a.mask_node, a.mask_node, a.slots, nodes);
    for (int64_t node = 0; node < nodes; node++) {
      if (!a.mask) layout.counts[node] = a.slots - a.nodes + first + node + 1;
      longest = std::max(longest, layout.counts[node]);
      const float* from = a.query + row * a.query_row + (first + node) * a.query_node + kv * group * a.query_head;
      for (int64_t head = 0; head < group; head++) {
        take_query(node * group + head, from + head * a.query_head, a.scale * LOG2E);
        if (!a.sinks) continue;
        float sink = a.sinks[kv * group + head];
        for (int64_t i = 0; CODED && i < head_dim; i++)  // the constant that all keys lack
          sink -= a.scale * from[head * a.query_head + i] * a.centre[kv * head_dim + i];
        start(node * group + head, sink * LOG2E);
      }
    }
    const uint8_t *key = a.key + row * a.key_row + kv * a.key_head, *value = a.value + row * a.key_row + kv * a.key_head;
    int32_t slots[SLOTS];
    for (int64_t at = 0; at < std::min(layout.common, longest); at += SLOTS) {
      for (int64_t i = 0; i < SLOTS; i++) slots[i] = int32_t(layout.begin + std::min(at + i, longest - 1));
      add(a, key, value, slots, 0, queries, [&](int64_t query) { return layout.counts[query / group] - at; });
    }
    for (int64_t node = 0; node < nodes; node++)
      for (int64_t at = layout.common; at < layout.counts[node]; at += SLOTS) {
        const int32_t* own = layout.own.data() + node * (a.slots + SLOTS) + at - layout.common;
        add(a, key, value, own, node * group, group, [&](int64_t) { return layout.counts[node] - at; });
      }
    for (int64_t query = 0; query < queries; query++) {
      int64_t head = ((row * a.nodes + first + query / group) * a.kv_heads + kv) * group + query % group;
      write(query, a.read + head * head_dim);
    }
  }
};

// Attention of nodes. Calls then(first, nodes, feature, features) with the first of some nodes, counted over all rows,
// and the first of their features that are read.
template <class Form, class Then>
void attend_in(const Attention& a, const Then& then) {
  int64_t together = std::max<int64_t>(1, QUERIES * a.kv_heads / a.heads);
  int64_t runs = (a.nodes + together - 1) / together;
  parts_of(a.batch * runs * a.kv_heads, 1, [&](int64_t begin, int64_t end) {
    thread_local Reading<Form> reading;
    AttentionTiles tiles;
    reading.tiles = &tiles;
    for (int64_t at = begin; at < end; at++) {
      int64_t kv = at % a.kv_heads, first = at / a.kv_heads % runs * together, row = at / a.kv_heads / runs;
      int64_t nodes = std::min(together, a.nodes - first), features = a.heads / a.kv_heads * a.head_dim;
      reading.attend(a, row, kv, first, nodes);
      then(row * a.nodes + first, nodes, kv * features, features);
    }
  });
}

template <class Then>
void attend_all(const Attention& a, const Then& then) {
  a.stored ? attend_in<Codes>(a, then) : attend_in<Halves>(a, then);
}

inline void attend_all(const Attention& a) {
  attend_all(a, [](int64_t, int64_t, int64_t, int64_t) {});
}

}  // namespace
