// Products with quantised weights.
//
// Weights lie in blocks of 16 output features, which are read in order, from one address to the next: processors
// prefetch nothing else. A block is a sequence of groups of 32 input features:
//   int4      256 bytes of codes, 16 scales, 16 values of code 0 (float16): the layout of GGUF's Q4_1, transposed
//   int8      of two groups: 512 bytes of codes plus 128 each, 16 scales (float16) each: Q8_0
//   bfloat16  1024 bytes
//   float32   2048 bytes
//   q5        256 bytes of codes' low 4 bits, 64 of their fifth, 16 scales, 16 values of code 0: Q5_0 and Q5_1
//   q4_k, q5_k, q6_k  superblocks of 8 groups: codes; 16 pairs of factors (uint8) for each group; 16 d, 16 dmin (float16)
// In the K formats, factors times d and -dmin are a group's scale and value of code 0. q6_k has factors (int8) of the
// first and of the last 16 features, and its codes are 32 too large.
// Within a group, 4 input features (bfloat16: 2, float32: 1) of all 16 output features are neighbours, the operand of a
// dot product instruction. Inputs of all but bfloat16 and float32 are quantised to int8, per row and group.

#pragma once

#include <utility>
#include <vector>

#include "formats.h"
#include "pair_products.h"
#include "tile_products.h"
#include "vectors.h"

extern "C" {

struct Linear {
  const uint8_t* blocks;
  const float* bias;  // may be null
  int64_t kind, in, out;
  int64_t features;    // output features of this kind, the first of ``out``
  const Linear* rest;  // those that follow, of other quantised kinds; null where there are none
};

}  // extern "C"

namespace {

constexpr int64_t TILE = LANES / 2;  // rows of inputs that share a load of weights
constexpr int64_t MOST_ROWS = 16;    // of a tile register
constexpr int64_t BLOCK = 16, GROUP = 32, CHUNK = 128;
constexpr int64_t AHEAD = 16;  // groups to prefetch

enum Kind : int64_t { INT4, INT8, BFLOAT16, FLOAT32, Q5, Q4_K, Q5_K, Q6_K };

#if defined(__AVX512VNNI__) && !defined(MMSPEC_PORTABLE)
constexpr bool VNNI = true;  // its instructions take codes without a sign
#else
constexpr bool VNNI = false;
#endif
constexpr int32_t START = VNNI ? 0x4b400000 : 0;  // of sums: the bits of OFFSET

// sums + the products of a group's codes, 4 input features of each lane in a vector, with its inputs
template <Kind kind>
inline ints dot(const bytes (&codes)[8], const int8_t* inputs, ints sums) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(MMSPEC_PORTABLE)
  __m256i pairs = _mm256_setzero_si256(), products = pairs, ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m256i input = _mm256_set1_epi32(load<int32_t>(inputs + 4 * i));
    if constexpr (kind == INT4) {  // 8 sums of two products, of at most 15 * 127, fit in 16 bits
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes[i], input));
    } else {  // two products of at most 127 * 127 do
      __m256i weights = _mm256_xor_si256((__m256i)codes[i], _mm256_set1_epi8(-128));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(input, weights));
      products = _mm256_add_epi32(products, _mm256_madd_epi16(pairs, ones));
    }
  }
  return sums + reinterpret_cast<ints>(kind == INT4 ? _mm256_madd_epi16(pairs, ones) : products);
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(MMSPEC_PORTABLE)
  int32x4_t halves[2];
  std::memcpy(halves, &sums, sizeof sums);
  for (int i = 0; i < 8; i++) {
    int8x16_t input = vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(inputs + 4 * i))), weights[2];
    std::memcpy(weights, &codes[i], sizeof weights);
    for (int half = 0; half < 2; half++) {
      if constexpr (kind == INT8) weights[half] = veorq_s8(weights[half], vdupq_n_s8(-128));
      halves[half] = vdotq_s32(halves[half], weights[half], input);
    }
  }
  return load<ints>(halves);
#else
  for (int i = 0; i < GROUP; i++)
    for (int lane = 0; lane < LANES; lane++)
      sums[lane] += (codes[i / 4][4 * lane + i % 4] - (kind == INT8 ? 128 : 0)) * inputs[i];
  return sums;
#endif
}

// Inputs of bfloat16 weights, rounded alike; instructions for bfloat16 take them in pairs.
#if defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
typedef uint16_t Half;
#else
typedef float Half;
#endif

inline Half half(float x) {
  uint32_t bits = load<uint32_t>(&x);
  bits += 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
#if defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
  return uint16_t(bits >> 16);
#else
  bits &= 0xffff0000;
  return load<float>(&bits);
#endif
}

// accumulator + 2 bfloat16 weights of each lane times the 2 inputs
inline floats dot(floats accumulator, ints weights, const Half* inputs) {
#if defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
  return reinterpret_cast<floats>(
      _mm512_dpbf16_ps((__m512)accumulator, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(load<int32_t>(inputs))));
#else
  accumulator = fma(as_floats(weights << 16), splat(inputs[0]), accumulator);
  return fma(as_floats(weights & int32_t(0xffff0000)), splat(inputs[1]), accumulator);
#endif
}

// Stores 16 inputs times ``factor`` as int8, rounded to nearest, ties to even; returns their sum.
inline int32_t quantise(const float* x, float factor, int8_t* codes) {
#if defined(__AVX512F__)
  __m512i rounded = _mm512_cvtps_epi32((__m512)(load<floats>(x) * factor));
  _mm_storeu_si128((__m128i*)codes, _mm512_cvtepi32_epi8(rounded));
  return _mm512_reduce_add_epi32(rounded);
#else
  int32_t sum = 0;
  for (int i = 0; i < 16; i++) codes[i] = int8_t(int32_t(__builtin_rintf(x[i] * factor)));
  for (int i = 0; i < 16; i++) sum += codes[i];
  return sum;
#endif
}

// sums (rows, 2) += products of a group's codes with its inputs in several rows; in Q6_K, with the first and the last 16.
template <Kind kind, int rows>
inline void dot_rows(const bytes (&codes)[8], const int8_t* inputs, ints (&sums)[rows][2]) {
#if defined(__AVX512VNNI__) && !defined(MMSPEC_PORTABLE)
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
      ints& sum = sums[row][kind == Q6_K ? i / 4 : 0];
      sum = reinterpret_cast<ints>(_mm512_dpbusd_epi32(
          (__m512i)sum, (__m512i)codes[i], _mm512_set1_epi32(load<int32_t>(inputs + row * GROUP + 4 * i))));
    }
#else
#if defined(MMSPEC_I8MM)
  if (kind <= INT8 && rows > 1 && has_i8mm) {
    ints pairs[rows];
    dot_pairs(codes, kind == INT8 ? 128 : 0, inputs, GROUP, rows, pairs);
    for (int row = 0; row < rows; row++) sums[row][0] += pairs[row];
    return;
  }
#endif
#pragma GCC unroll 8
  for (int row = 0; row < rows; row++)
    if constexpr (kind > FLOAT32)
      dot_halves(codes, inputs + row * GROUP, sums[row]);
    else
      sums[row][0] = dot<kind>(codes, inputs + row * GROUP, sums[row][0]);
#endif
}

inline int64_t groups_of(int64_t features) { return (features + GROUP - 1) / GROUP; }

// Rows of inputs in the form that a kind of weights takes, padded to whole groups: (rows / 16, groups, 16 rows), so
// that what a tile reads lies together.
struct Rows {
  int64_t groups;
  Lines<int8_t> codes;
  Lines<Half> rounded;
  Lines<float> exact, scale, total_scaled;
  Lines<int32_t> int8_start, q6_start, q6_last_start;  // what products of these kinds' codes start from

  // Makes room for CHUNK rows.
  void shape(int64_t features) {
    groups = groups_of(features);
    int64_t all = CHUNK * groups;
    codes.reserve(all * GROUP), rounded.reserve(all * GROUP), exact.reserve(all * GROUP);
    scale.reserve(all), total_scaled.reserve(all);
    int8_start.reserve(all), q6_start.reserve(all), q6_last_start.reserve(all);
  }

  // Index of a group of a row; the next row's follows, within 16 rows.
  int64_t at(int64_t row, int64_t group) const {
    return (row / MOST_ROWS * groups + group) * MOST_ROWS + row % MOST_ROWS;
  }

  // Stores 32 features of a row.
  void set(Kind kind, int64_t row, int64_t group, const float* x) {
    int64_t index = at(row, group), first = index * GROUP;
    if (kind == FLOAT32) {
      std::memcpy(&exact[first], x, GROUP * sizeof(float));
      return;
    }
    if (kind == BFLOAT16) {
      for (int i = 0; i < GROUP; i++) rounded[first + i] = half(x[i]);
      return;
    }
    floats most{};
    for (int i = 0; i < GROUP; i += LANES) {
      floats part = load<floats>(x + i);
      part = part < 0 ? -part : part;
      most = part > most ? part : most;
    }
    float magnitude = greatest(most), step = magnitude / 127, inverse = magnitude > 0 ? 127 / magnitude : 0;
    int32_t sums[2];
    for (int part = 0; part < 2; part++)
      sums[part] = quantise(x + part * GROUP / 2, inverse, &codes[first + part * GROUP / 2]);
    int32_t total = sums[0] + sums[1];
    int8_start[index] = START - (VNNI ? 128 * total : 0);
    q6_start[index] = START - 32 * sums[0], q6_last_start[index] = START - 32 * sums[1];
    scale[index] = step, total_scaled[index] = step * float(total);
  }
};

// Codes and scales of a group; groups whose scales share a cache line, so that no load crosses one, and what they share.
constexpr int64_t code_bytes[] = {256, 512, 1024, 2048, 320, 256, 320, 384};
constexpr int64_t scale_bytes[] = {64, 32, 0, 0, 64, 32, 32, 32};
constexpr int64_t together[] = {1, 2, 1, 1, 1, 8, 8, 8}, shared_bytes[] = {0, 0, 0, 0, 0, 64, 64, 64};

constexpr int64_t block_bytes(Kind kind, int64_t groups) {
  return (groups + together[kind] - 1) / together[kind] *
         (together[kind] * (code_bytes[kind] + scale_bytes[kind]) + shared_bytes[kind]);
}

template <Kind kind>
inline void unpack_group(const uint8_t* from, bytes (&codes)[8]) {
  if constexpr (kind == INT8) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) codes[i] = load<bytes>(from + 64 * i);
  } else {
    unpack<int(code_bytes[kind] - 256) / 64>(from, from + 256, codes);
  }
}

template <Kind kind>
inline Scales scales_of(const uint8_t* scales, int64_t group) {
  if constexpr (kind == INT8) return {widen(load<halves>(scales)), floats{}, floats{}};
  if constexpr (kind == INT4 || kind == Q5) return group_scales(scales, scales + 2 * BLOCK);
  const uint8_t* shared = scales + (together[kind] - group % together[kind]) * scale_bytes[kind];
  return superblock_scales<kind == Q6_K>(scales, shared, shared + 2 * BLOCK);
}

// Products times a scale. Those of VNNI start from the bits of OFFSET, so that they need no conversion: scales have so few
// bits that OFFSET times a scale is exact.
inline floats scaled(ints products, floats scale) {
  if constexpr (VNNI) return fma(as_floats(products), scale, scale * -OFFSET);
  return __builtin_convertvector(products, floats) * scale;
}

// sum + the products of a group's codes with a row's inputs, its first and its last ones, scaled.
template <Kind kind>
inline floats add_scaled(floats sum, ints first, ints last, const Scales& scale, const Rows& x, int64_t at) {
  floats products = scaled(kind == Q6_K ? first : first + last, scale.first);
  if constexpr (kind == Q6_K)
    products = fma(VNNI ? as_floats(last) - OFFSET : __builtin_convertvector(last, floats), scale.last, products);
  else if constexpr (kind != INT8)
    sum = fma(scale.low, splat(x.total_scaled[at]), sum);
  return fma(products, splat(x.scale[at]), sum);
}

// Where there is less to compute, the prefetching of processors without AMX keeps up, except in superblocks.
#if defined(MMSPEC_AMX)
constexpr int PREFETCHED_ROWS = 1;
#else
constexpr int PREFETCHED_ROWS = 4;
#endif

// Into the second level cache: the first one's lines are taken by loads.
template <Kind kind>
inline void prefetch_group(const uint8_t* from, const uint8_t* scales) {
  constexpr int64_t ahead = block_bytes(kind, AHEAD);
  for (int64_t i = 0; i < code_bytes[kind]; i += 64) __builtin_prefetch(from + ahead + i, 0, 2);
  if constexpr (scale_bytes[kind] > 0) __builtin_prefetch(scales + ahead, 0, 2);
}

// Adds the products of one group of LANES output features and the same group of several rows, for which weights are
// loaded once.
template <Kind kind, int tile>
inline void add_group(const uint8_t* from, const uint8_t* scales, const Rows& x, int64_t first, int64_t group,
                      floats* sums) {
  if constexpr (shared_bytes[kind] > 0 || (kind != FLOAT32 && tile >= PREFETCHED_ROWS))
    prefetch_group<kind>(from, scales);
  if constexpr (kind == FLOAT32) {
    const float* input = &x.exact[x.at(first, group) * GROUP];
    for (int i = 0; i < GROUP; i += 2) {
      floats even = load<floats>(from + 64 * i), odd = load<floats>(from + 64 * i + 64);
#pragma GCC unroll 8
      for (int row = 0; row < tile; row++) {
        sums[row] = fma(even, splat(input[row * GROUP + i]), sums[row]);
        sums[tile + row] = fma(odd, splat(input[row * GROUP + i + 1]), sums[tile + row]);
      }
    }
  } else if constexpr (kind == BFLOAT16) {
    const Half* input = &x.rounded[x.at(first, group) * GROUP];
    for (int i = 0; i < 16; i += 2) {
      ints even = load<ints>(from + 64 * i), odd = load<ints>(from + 64 * i + 64);
#pragma GCC unroll 8
      for (int row = 0; row < tile; row++) {
        sums[row] = dot(sums[row], even, input + row * GROUP + 2 * i);
        sums[tile + row] = dot(sums[tile + row], odd, input + row * GROUP + 2 * i + 2);
      }
    }
  } else {
    bytes codes[8];
    unpack_group<kind>(from, codes);
    Scales scale = scales_of<kind>(scales, group);
    int64_t at = x.at(first, group);
    ints parts[tile][2] = {};
    for (int row = 0; row < tile; row++) {
      if constexpr (kind == Q6_K) parts[row][1] += x.q6_last_start[at + row];
      parts[row][0] += kind == Q6_K ? x.q6_start[at + row] : kind == INT8 && VNNI ? x.int8_start[at + row] : START;
    }
    dot_rows<kind>(codes, &x.codes[at * GROUP], parts);
#pragma GCC unroll 8
    for (int row = 0; row < tile; row++)
      sums[row] = add_scaled<kind>(sums[row], parts[row][0], parts[row][1], scale, x, at + row);
  }
}

// Codes and scales of a group of a block.
template <Kind kind>
inline std::pair<const uint8_t*, const uint8_t*> group_at(const uint8_t* block, int64_t group) {
  int64_t place = group % together[kind];
  block += block_bytes(kind, group - place);
  return {block + place * code_bytes[kind], block + together[kind] * code_bytes[kind] + place * scale_bytes[kind]};
}

// LANES output features of a block, from ``part`` on.
template <Kind kind, int tile>
void block_product(const uint8_t* block, int64_t part, const Rows& x, int64_t first, floats* sums) {
  floats local[2 * tile] = {};
  for (int64_t group = 0; group < x.groups; group++) {
    auto [codes, scales] = group_at<kind>(block, group);
    add_group<kind, tile>(codes + 4 * part, scales + 2 * part, x, first, group, local);
  }
  for (int row = 0; row < tile; row++) sums[row] += local[row] + local[tile + row];
}

template <Kind kind, int tile = TILE>
void tile_product(int rows, const uint8_t* block, int64_t part, const Rows& x, int64_t first, floats* sums) {
  if constexpr (tile > 1)
    if (rows < tile) return tile_product<kind, tile - 1>(rows, block, part, x, first, sums);
  block_product<kind, tile>(block, part, x, first, sums);
}

// out = sum (+ residual), of the first ``columns``.
inline void add_columns(floats sum, const float* residual, int64_t columns, float* out) {
  if (columns == LANES) return store(out, residual ? load<floats>(residual) + sum : sum);
  floats earlier{};
  if (residual) std::memcpy(&earlier, residual, columns * sizeof(float));
  sum += earlier;
  std::memcpy(out, &sum, columns * sizeof(float));
}

// out = x W^T + bias (+ residual), rows ``stride`` apart; called by all threads of a team.
template <Kind kind>
void product_of(const Linear& layer, const Rows& x, int64_t rows, float* out, int64_t stride, const float* residual) {
  int64_t block_size = block_bytes(kind, x.groups);
  Tiles tiles;
#pragma omp for schedule(static)
  for (int64_t block = 0; block < (layer.features + BLOCK - 1) / BLOCK; block++)
    for (int64_t column = block * BLOCK; column < std::min(block * BLOCK + BLOCK, layer.features); column += LANES) {
      int64_t columns = std::min(LANES, layer.features - column);
      floats bias{};
      if (layer.bias) std::memcpy(&bias, layer.bias + column, columns * sizeof(float));
      const uint8_t* weights = layer.blocks + block * block_size;
      for (int64_t first = 0; first < rows; first += MOST_ROWS) {
        int count = int(std::min(MOST_ROWS, rows - first));
        floats sums[MOST_ROWS];
        for (int i = 0; i < count; i++) {
          sums[i] = bias;
          __builtin_prefetch(out + (first + i) * stride + column, 1);
        }
        if (kind == BFLOAT16 && has_tiles)
          tiles.add(&x.rounded[x.at(first, 0) * GROUP], weights, x.groups, count, sums);
        else
          for (int i = 0; i < count; i += TILE)
            tile_product<kind>(std::min(int(TILE), count - i), weights, column % BLOCK, x, first + i, sums + i);
        for (int i = 0; i < count; i++) {
          int64_t at = (first + i) * stride + column;
          add_columns(sums[i], residual ? residual + at : nullptr, columns, out + at);
        }
      }
    }
}

void product_of_kind(const Linear& layer, const Rows& x, int64_t rows, float* out, int64_t stride,
                     const float* residual) {
  if (layer.kind == INT4) return product_of<INT4>(layer, x, rows, out, stride, residual);
  if (layer.kind == INT8) return product_of<INT8>(layer, x, rows, out, stride, residual);
  if (layer.kind == FLOAT32) return product_of<FLOAT32>(layer, x, rows, out, stride, residual);
  if (layer.kind == Q5) return product_of<Q5>(layer, x, rows, out, stride, residual);
  if (layer.kind == Q4_K) return product_of<Q4_K>(layer, x, rows, out, stride, residual);
  if (layer.kind == Q5_K) return product_of<Q5_K>(layer, x, rows, out, stride, residual);
  if (layer.kind == Q6_K) return product_of<Q6_K>(layer, x, rows, out, stride, residual);
  product_of<BFLOAT16>(layer, x, rows, out, stride, residual);
}

// Rows of ``out`` and of ``residual`` are ``stride`` apart, by default ``layer.out``.
void product(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual = nullptr,
             int64_t stride = 0) {
  if (stride == 0) stride = layer.out;
  for (const Linear* part = &layer; part; out += part->features, part = part->rest) {
    product_of_kind(*part, x, rows, out, stride, residual);
    if (residual) residual += part->features;
  }
}

// A layer of one kind with its outputs from ``first`` on, a multiple of BLOCK.
inline Linear outputs_from(const Linear& layer, int64_t first) {
  int64_t skipped = first / BLOCK * block_bytes(Kind(layer.kind), groups_of(layer.in));
  int64_t left = layer.out - first;
  return {layer.blocks + skipped, layer.bias ? layer.bias + first : nullptr, layer.kind, layer.in, left, left, nullptr};
}

// Rows as the inputs of a layer; called by all threads of a team.
void take(const Linear& layer, Rows& x, const float* from, int64_t rows) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < x.groups; group++) {
      const float* part = from + row * layer.in + group * GROUP;
      float padded[GROUP] = {};
      int64_t left = layer.in - group * GROUP;
      if (left < GROUP) std::memcpy(padded, part, left * sizeof(float));
      x.set(Kind(layer.kind), row, group, left < GROUP ? padded : part);
    }
}

// The factor of RMSNorm; ``features`` is a multiple of LANES.
inline floats norm_factor(const float* row, int64_t features, float epsilon) {
  floats low{}, high{};
  int64_t i = 0;
  for (; i + 2 * LANES <= features; i += 2 * LANES) {
    floats a = load<floats>(row + i), b = load<floats>(row + i + LANES);
    low = fma(a, a, low), high = fma(b, b, high);
  }
  if (i < features) low = fma(load<floats>(row + i), load<floats>(row + i), low);
  return splat(1 / std::sqrt(sum(low + high) / float(features) + epsilon));
}

// RMSNorm of a row; ``out`` may be the row itself.
inline void norm_row(const float* row, int64_t features, const float* weight, float epsilon, float* out) {
  floats factor = norm_factor(row, features, epsilon);
  for (int64_t i = 0; i < features; i += LANES)
    store(out + i, load<floats>(row + i) * factor * load<floats>(weight + i));
}

// RMSNorm(rows) as the inputs of a layer; they have several parts, each normed by itself, of a multiple of 32 features.
void take_normed(const Linear& layer, Rows& x, const float* from, int64_t rows, const float* weight, float epsilon,
                 int64_t parts = 1) {
  int64_t features = layer.in / parts;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t part = 0; part < layer.in; part += features) {
      const float* input = from + row * layer.in + part;
      floats factor = norm_factor(input, features, epsilon);
      float normed[GROUP];
      for (int64_t at = 0; at < features; at += GROUP) {
        for (int64_t i = 0; i < GROUP; i += LANES)
          store(normed + i, load<floats>(input + at + i) * factor * load<floats>(weight + part + at + i));
        x.set(Kind(layer.kind), row, (part + at) / GROUP, normed);
      }
    }
}

// act(gate) * up as the inputs of a layer, act being silu or gelu, rows ``stride`` apart; ``in`` is a
// multiple of 32.
void take_gated(const Linear& layer, Rows& x, const float* gate_up, int64_t stride, int64_t rows, bool with_gelu) {
#pragma omp for schedule(static) collapse(2)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < x.groups; group++) {
      const float* gate = gate_up + row * stride + group * GROUP;
      float gated[GROUP];
      for (int64_t i = 0; i < GROUP; i += LANES) {
        floats z = load<floats>(gate + i);
        store(gated + i, (with_gelu ? gelu(z) : silu(z)) * load<floats>(gate + layer.in + i));
      }
      x.set(Kind(layer.kind), row, group, gated);
    }
}

}  // namespace
