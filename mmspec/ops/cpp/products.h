// Products of rows with weights.

#pragma once

#include "rows.h"
#include "tile_products.h"

namespace {

constexpr int64_t TILE = LANES / 2;  // input rows per load of weights
constexpr int64_t AHEAD = 10240;     // prefetch distance in bytes
constexpr int64_t RUN = 1 << 16;     // bytes of weights

// Products times a scale. VNNI sums start from the bits of OFFSET, which avoids a conversion: OFFSET times a scale is
// exact, because scales have few bits.
inline floats scaled(ints products, floats scale) {
  if constexpr (VNNI) return fma(as_floats(products), scale, scale * -OFFSET);
  return __builtin_convertvector(products, floats) * scale;
}

// sum + scaled products of a group's codes with the first and last inputs of a row.
template <Kind kind>
inline floats add_scaled(floats sum, ints first, ints last, const Scales& scale, const Rows& x, int64_t at) {
  floats products = scaled(kind == Q6_K ? first : first + last, scale.first);
  if constexpr (kind == Q6_K)
    products = fma(VNNI ? as_floats(last) - OFFSET : __builtin_convertvector(last, floats), scale.last, products);
  else if constexpr (kind != INT8 && kind != MXFP4)
    sum = fma(scale.low, splat(x.total_scaled[at]), sum);
  return fma(products, splat(x.scale[at]), sum);
}

// Prefetches in address order, unlike the loads, and to L1: up to a third faster for a single row than prefetching
// codes and scales to L2.
template <Kind kind>
inline void prefetch_group(const uint8_t* block, int64_t group) {
  constexpr int64_t size = block_bytes(kind, together[kind]) / together[kind];
  for (int64_t i = 0; i < size; i += 64) __builtin_prefetch(block + group * size + AHEAD + i);
}

// Adds the products of one group of a block of floats and the same group of several rows, from ``at`` on; weights are
// loaded once for all rows.
template <Kind kind, int tile>
inline void add_group(const uint8_t* from, const uint8_t* scales, const Rows& x, int64_t at, int64_t group,
                      floats* sums) {
  if constexpr (kind == FLOAT32) {
    const float* input = &x.exact[at * GROUP];
    for (int i = 0; i < GROUP; i += 2) {
      floats even = load<floats>(from + 64 * i), odd = load<floats>(from + 64 * i + 64);
#pragma GCC unroll 8
      for (int row = 0; row < tile; row++) {
        sums[row] = fma(even, splat(input[row * GROUP + i]), sums[row]);
        sums[tile + row] = fma(odd, splat(input[row * GROUP + i + 1]), sums[tile + row]);
      }
    }
  } else if constexpr (kind == BFLOAT16) {
    const Half* input = &x.rounded[at * GROUP];
    for (int i = 0; i < 16; i += 2) {
      ints even = load<ints>(from + 64 * i), odd = load<ints>(from + 64 * i + 64);
#pragma GCC unroll 8
      for (int row = 0; row < tile; row++) {
        sums[row] = dot(sums[row], even, input + row * GROUP + 2 * i);
        sums[tile + row] = dot(sums[tile + row], odd, input + row * GROUP + 2 * i + 2);
      }
    }
  } else {
    ints parts[tile][PARTS][2] = {};
    for (int row = 0; row < tile; row++)
      for (int part = 0; part < PARTS; part++) {
        if constexpr (kind == Q6_K) parts[row][part][1] += x.q6_last_start[at + row];
        parts[row][part][0] += kind == Q6_K            ? x.q6_start[at + row]
                               : kind == MXFP4         ? x.mxfp4_start[at + row]
                               : kind == INT8 && VNNI ? x.int8_start[at + row]
                                                       : START;
      }
    constexpr bool early = shared_bytes[kind] > 0;  // faster for superblocks
    constexpr int64_t scale_size = kind == MXFP4 ? 1 : 2;
    Scales scale[PARTS];
    auto take_scales = [&] {
      for (int part = 0; part < PARTS; part++) scale[part] = scales_of<kind>(scales + scale_size * LANES * part, group);
    };
    if (early) take_scales();
    dot_rows<kind>(from, &x.codes[at * GROUP], parts);
    if (!early) take_scales();
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
#pragma GCC unroll 8
      for (int row = 0; row < tile; row++) {
        const ints(&products)[2] = parts[row][part];
        floats& sum = sums[row * PARTS + part];
        sum = add_scaled<kind>(sum, products[0], products[1], scale[part], x, at + row);
      }
    }
  }
}

// Adds the products of a block's output features to sums (tile, PARTS).
template <Kind kind, int tile>
void block_product(const uint8_t* block, const Rows& x, int64_t first, floats* sums) {
  constexpr bool whole = kind != FLOAT32 && kind != BFLOAT16;
  for (int part = 0; part < (whole ? 1 : PARTS); part++) {
    floats local[2 * tile] = {};
    for (int64_t group = 0, at = x.at(first, 0); group < x.groups; group++, at += x.width) {
      prefetch_group<kind>(block, group);
      auto [codes, scales] = group_at<kind>(block, group);
      add_group<kind, tile>(codes + 4 * LANES * part, scales, x, at, group, local);
    }
    if constexpr (whole)
      for (int i = 0; i < tile * PARTS; i++) sums[i] += local[i];
    else
      for (int row = 0; row < tile; row++) sums[row * PARTS + part] += local[row] + local[tile + row];
  }
}

template <Kind kind, int tile = TILE>
void tile_product(int rows, const uint8_t* block, const Rows& x, int64_t first, floats* sums) {
  if constexpr (tile > 1)
    if (rows < tile) return tile_product<kind, tile - 1>(rows, block, x, first, sums);
  block_product<kind, tile>(block, x, first, sums);
}

// out = sum, or residual + scale * sum, for the first ``columns``.
inline void add_columns(floats sum, const float* residual, float scale, int64_t columns, float* out) {
  if (columns == LANES) return store(out, residual ? load<floats>(residual) + scale * sum : sum);
  floats earlier{};
  if (residual) std::memcpy(&earlier, residual, columns * sizeof(float)), sum = earlier + scale * sum;
  std::memcpy(out, &sum, columns * sizeof(float));
}

// Products of rows, written to ``out`` without columns before ``origin``, in rows ``stride`` apart; with a residual,
// its sum with ``scale`` times the products.
struct Products {
  const Rows& x;
  int64_t rows;
  float* out;
  int64_t stride;
  const float* residual = nullptr;
  float scale = 1;
  int64_t origin = 0;
};

// sums (rows, PARTS) = x W^T * factor + bias for a block's output features from ``column`` on, for up to 16 rows of a
// tile from ``first`` on.
template <Kind kind>
void block_outputs(const Linear& layer, int64_t column, const Rows& x, int64_t first, int rows, Tiles& tiles,
                   floats* sums) {
  const uint8_t* weights = layer.blocks + column / BLOCK * block_bytes(kind, x.groups);
  for (int i = 0; i < rows * PARTS; i++) sums[i] = floats{};
  if (kind == BFLOAT16 && has_tiles)
    tiles.add(&x.rounded[x.at(first, 0) * GROUP], weights, x.groups, x.width, rows, sums);
  else
    for (int i = 0; i < rows; i += TILE)
      tile_product<kind>(std::min(int(TILE), rows - i), weights, x, first + i, sums + i * PARTS);
  for (int part = 0; part < PARTS; part++) {
    int64_t at = column + LANES * part, columns = std::clamp(layer.features - at, int64_t(0), LANES);
    floats bias{};
    if (layer.bias) std::memcpy(&bias, layer.bias + at, columns * sizeof(float));
    for (int i = 0; i < rows; i++)
      sums[i * PARTS + part] = fma(sums[i * PARTS + part], splat(x.factor[first + i]), bias);
  }
}

// The block of a layer's output features from ``column`` on, written to column ``at``.
template <Kind kind>
void add_block_of(const Linear& layer, int64_t column, const Products& to, int64_t at, Tiles& tiles) {
  for (int64_t first = 0; first < to.rows; first += MOST_ROWS) {
    int count = int(std::min(MOST_ROWS, to.rows - first));
    floats sums[MOST_ROWS * PARTS];
    for (int i = 0; i < count; i++) __builtin_prefetch(to.out + (first + i) * to.stride + at, 1);
    block_outputs<kind>(layer, column, to.x, first, count, tiles, sums);
    for (int i = 0; i < count * PARTS; i++) {
      int64_t part = i % PARTS * LANES, place = (first + i / PARTS) * to.stride + at + part;
      int64_t columns = std::clamp(layer.features - column - part, int64_t(0), LANES);
      add_columns(sums[i], to.residual ? to.residual + place : nullptr, to.scale, columns, to.out + place);
    }
  }
}

// Calls body with a kind as a compile-time constant.
template <class Body>
void with_kind(int64_t kind, const Body& body) {
  switch (Kind(kind)) {
    case INT4: return body(std::integral_constant<Kind, INT4>{});
    case INT8: return body(std::integral_constant<Kind, INT8>{});
    case FLOAT32: return body(std::integral_constant<Kind, FLOAT32>{});
    case Q5: return body(std::integral_constant<Kind, Q5>{});
    case Q4_K: return body(std::integral_constant<Kind, Q4_K>{});
    case Q5_K: return body(std::integral_constant<Kind, Q5_K>{});
    case Q6_K: return body(std::integral_constant<Kind, Q6_K>{});
    case MXFP4: return body(std::integral_constant<Kind, MXFP4>{});
    default: return body(std::integral_constant<Kind, BFLOAT16>{});
  }
}

inline int64_t blocks_of(const Linear& layer) { return (layer.features + BLOCK - 1) / BLOCK; }

// Minimum of items of ``features`` output features in a part of a loop: weights are read in runs of 64 KiB or more, as
// short runs are read at half the rate.
inline int64_t least_of(const Linear& layer, int64_t features) {
  int64_t bytes = block_bytes(Kind(layer.kind), groups_of(layer.in)) * features / BLOCK;
  return std::max<int64_t>(1, RUN / bytes);
}

// Products of a layer's blocks from ``first`` on.
inline void products(const Linear& layer, int64_t first, int64_t count, const Products& to, Tiles& tiles) {
  int64_t at = -to.origin;
  for (const Linear* part = &layer; count > 0; at += part->features, part = part->rest) {
    int64_t end = std::min(first + count, blocks_of(*part)), begin = std::min(first, end);
    with_kind(part->kind, [&](auto kind) {
      for (int64_t block = begin; block < end; block++)
        add_block_of<decltype(kind)::value>(*part, block * BLOCK, to, at + block * BLOCK, tiles);
    });
    first = std::max(first, end) - blocks_of(*part), count -= end - begin;
  }
}

// out = x W^T, or residual + scale * x W^T, in rows ``stride`` apart, by default ``layer.out``.
void product(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual = nullptr,
             float scale = 1, int64_t stride = 0) {
  int64_t blocks = 0;
  for (const Linear* part = &layer; part; part = part->rest) blocks += blocks_of(*part);
  parts_of(blocks, least_of(layer, BLOCK), [&](int64_t begin, int64_t end) {
    Tiles tiles;
    products(layer, begin, end - begin, {x, rows, out, stride ? stride : layer.out, residual, scale}, tiles);
  });
}

// The same for inputs of a multiple of 32 features, which are also inputs of the next layer, normed by ``weight``.
void product_then_norm(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual, float scale,
                       const Linear& next_layer, Rows& next, const float* weight, float epsilon) {
  next.shape(next_layer.in, rows);
  parts_of(next.groups, least_of(layer, GROUP), [&](int64_t begin, int64_t end) {
    Tiles tiles;
    int64_t first = begin * GROUP / BLOCK, blocks = (end - begin) * GROUP / BLOCK;
    products(layer, first, blocks, {x, rows, out, layer.out, residual, scale}, tiles);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t group = begin, at = row * layer.out + begin * GROUP; group < end; group++, at += GROUP)
        next.set_normed(Kind(next_layer.kind), row, group, out + at, weight + group * GROUP);
  });
  next.norm(rows, epsilon);
}

// Products after an activation, or gated products of gates and then ups, as inputs of the next layer, of a multiple of
// 32 features.
void gated_product(const Linear& gate_up, const Rows& x, int64_t rows, Gating gating, const Linear& next_layer,
                   Rows& next) {
  constexpr int64_t BUFFER = 2 * CHUNK * GROUP;  // floats
  int64_t most = BUFFER / (rows * GROUP);        // groups of gates, then of ups: weights are read in long runs
  next.shape(next_layer.in, rows);
  parts_of(next.groups, least_of(gate_up, GROUP), [&](int64_t begin, int64_t end) {
    thread_local Lines<float> both;
    both.reserve(2 * BUFFER);
    Tiles tiles;
    for (int64_t first = begin, count; first < end; first += count) {
      count = std::min(most, end - first);
      int64_t gate = first * GROUP, up = next_layer.in + gate, stride = count * GROUP, blocks = stride / BLOCK;
      float *gates = &both[0], *ups = gating.activation == SQUARED_RELU ? gates : gates + rows * stride;
      products(gate_up, gate / BLOCK, blocks, {x, rows, gates, stride, nullptr, 1, gate}, tiles);
      if (ups != gates) products(gate_up, up / BLOCK, blocks, {x, rows, ups, stride, nullptr, 1, up}, tiles);
      for (int64_t i = 0; i < rows * stride; i += LANES)
        store(gates + i, gating(load<floats>(gates + i), load<floats>(ups + i)));
      for (int64_t i = 0; i < rows * count; i++)
        next.set(Kind(next_layer.kind), i / count, first + i % count, gates + i * GROUP);
    }
  });
}

}  // namespace
