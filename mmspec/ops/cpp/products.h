// Products of rows with weights.

#pragma once

#include "rows.h"
#include "tile_products.h"

namespace {

constexpr int64_t TILE = LANES / 2;  // input rows per load of weights
constexpr int64_t AHEAD = 10240;     // prefetch distance in bytes

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

// out = sum (+ residual), for the first ``columns``.
inline void add_columns(floats sum, const float* residual, int64_t columns, float* out) {
  if (columns == LANES) return store(out, residual ? load<floats>(residual) + sum : sum);
  floats earlier{};
  if (residual) std::memcpy(&earlier, residual, columns * sizeof(float));
  sum += earlier;
  std::memcpy(out, &sum, columns * sizeof(float));
}

// sums (rows, PARTS) = a block's output features from ``column`` on, for up to 16 rows of a tile from ``first`` on.
template <Kind kind>
void block_outputs(const Linear& layer, int64_t column, const Rows& x, int64_t first, int rows, Tiles& tiles,
                   floats* sums) {
  const uint8_t* weights = layer.blocks + column / BLOCK * block_bytes(kind, x.groups);
  for (int part = 0; part < PARTS; part++) {
    int64_t at = column + LANES * part, columns = std::clamp(layer.features - at, int64_t(0), LANES);
    floats bias{};
    if (layer.bias) std::memcpy(&bias, layer.bias + at, columns * sizeof(float));
    for (int i = 0; i < rows; i++) sums[i * PARTS + part] = bias;
  }
  if (kind == BFLOAT16 && has_tiles)
    tiles.add(&x.rounded[x.at(first, 0) * GROUP], weights, x.groups, x.width, rows, sums);
  else
    for (int i = 0; i < rows; i += TILE)
      tile_product<kind>(std::min(int(TILE), rows - i), weights, x, first + i, sums + i * PARTS);
}

// out = x W^T + bias (+ residual), rows ``stride`` apart.
template <Kind kind>
void product_of(const Linear& layer, const Rows& x, int64_t rows, float* out, int64_t stride, const float* residual) {
  auto columns_from = [&](int64_t column, Tiles& tiles) {
    for (int64_t first = 0; first < rows; first += MOST_ROWS) {
      int count = int(std::min(MOST_ROWS, rows - first));
      floats sums[MOST_ROWS * PARTS];
      for (int i = 0; i < count; i++) __builtin_prefetch(out + (first + i) * stride + column, 1);
      block_outputs<kind>(layer, column, x, first, count, tiles, sums);
      for (int i = 0; i < count * PARTS; i++) {
        int64_t from = column + i % PARTS * LANES, at = (first + i / PARTS) * stride + from;
        int64_t columns = std::clamp(layer.features - from, int64_t(0), LANES);
        add_columns(sums[i], residual ? residual + at : nullptr, columns, out + at);
      }
    }
  };
  parts_of((layer.features + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
    Tiles tiles;
    for (int64_t block = begin; block < end; block++) columns_from(block * BLOCK, tiles);
  });
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

// Rows of ``out`` and of ``residual`` are ``stride`` apart, by default ``layer.out``.
void product(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual = nullptr,
             int64_t stride = 0) {
  if (stride == 0) stride = layer.out;
  for (const Linear* part = &layer; part; out += part->features, part = part->rest) {
    with_kind(part->kind, [&](auto kind) { product_of<decltype(kind)::value>(*part, x, rows, out, stride, residual); });
    if (residual) residual += part->features;
  }
}

}  // namespace
