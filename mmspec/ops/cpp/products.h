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

// The products of a group's codes, 4 input features of each lane in a vector, with its inputs, whose sum is ``total``.
template <Kind kind>
inline ints dot(const bytes (&codes)[8], const int8_t* inputs, [[maybe_unused]] int32_t total) {
#if defined(__AVX512VNNI__) && !defined(MMSPEC_PORTABLE)
  ints sums[2] = {};
  if constexpr (kind == INT8) sums[0] -= 128 * total;
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    sums[i % 2] = reinterpret_cast<ints>(_mm512_dpbusd_epi32((__m512i)sums[i % 2], (__m512i)codes[i],
                                                             _mm512_set1_epi32(load<int32_t>(inputs + 4 * i))));
  return sums[0] + sums[1];
#elif defined(__AVX2__) && !defined(MMSPEC_PORTABLE)
  __m256i pairs = _mm256_setzero_si256(), sums = pairs, ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m256i input = _mm256_set1_epi32(load<int32_t>(inputs + 4 * i));
    if constexpr (kind == INT4) {  // 8 sums of two products, of at most 15 * 127, fit in 16 bits
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16((__m256i)codes[i], input));
    } else {  // two products of at most 127 * 127 do
      __m256i weights = _mm256_xor_si256((__m256i)codes[i], _mm256_set1_epi8(-128));
      pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(input, weights));
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
    }
  }
  return reinterpret_cast<ints>(kind == INT4 ? _mm256_madd_epi16(pairs, ones) : sums);
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(MMSPEC_PORTABLE)
  int32x4_t sums[2] = {};
  for (int i = 0; i < 8; i++) {
    int8x16_t input = vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(inputs + 4 * i))), weights[2];
    std::memcpy(weights, &codes[i], sizeof weights);
    for (int half = 0; half < 2; half++) {
      if constexpr (kind == INT8) weights[half] = veorq_s8(weights[half], vdupq_n_s8(-128));
      sums[half] = vdotq_s32(sums[half], weights[half], input);
    }
  }
  return load<ints>(sums);
#else
  ints sums{};
  if constexpr (kind == INT8) sums -= 128 * total;
  for (int i = 0; i < GROUP; i++)
    for (int lane = 0; lane < LANES; lane++) sums[lane] += int32_t(codes[i / 4][4 * lane + i % 4]) * inputs[i];
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

inline int64_t groups_of(int64_t features) { return (features + GROUP - 1) / GROUP; }

// Rows of inputs in the form that a kind of weights takes, padded to whole groups.
struct Rows {
  int64_t width, groups;
  std::vector<int8_t> codes;
  std::vector<Half> rounded;
  std::vector<float> exact, scale, total_scaled;
  std::vector<int32_t> total, first_total;  // of a group's codes, of the first 16

  // Makes room for CHUNK rows.
  void shape(int64_t features) {
    groups = groups_of(features), width = groups * GROUP;
    if (codes.size() < size_t(CHUNK * width)) {
      codes.resize(CHUNK * width), rounded.resize(CHUNK * width), exact.resize(CHUNK * width);
      scale.resize(CHUNK * groups), total_scaled.resize(CHUNK * groups), total.resize(CHUNK * groups);
      first_total.resize(CHUNK * groups);
    }
  }

  // Stores 32 features of a row.
  void set(Kind kind, int64_t row, int64_t group, const float* x) {
    int64_t first = row * width + group * GROUP, at = row * groups + group;
    if (kind == FLOAT32) {
      std::memcpy(exact.data() + first, x, GROUP * sizeof(float));
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
    int8_t* code = codes.data() + first;
    int32_t sum = 0;
    for (int i = 0; i < GROUP; i++) code[i] = int8_t(int32_t(__builtin_rintf(x[i] * inverse)));
    for (int i = 0; i < GROUP / 2; i++) sum += code[i];
    first_total[at] = sum;
    for (int i = GROUP / 2; i < GROUP; i++) sum += code[i];
    scale[at] = step, total[at] = sum, total_scaled[at] = step * float(sum);
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

// sum + the products of a group's codes with a row's inputs, its first and its last ones, scaled.
template <Kind kind>
inline floats add_scaled(floats sum, ints first, ints last, const Scales& scale, const Rows& x, int64_t at) {
  floats products;
  if constexpr (kind == Q6_K) {
    first -= 32 * x.first_total[at], last -= 32 * (x.total[at] - x.first_total[at]);
    products = __builtin_convertvector(first, floats) * scale.first;
    products = fma(__builtin_convertvector(last, floats), scale.last, products);
  } else {
    if constexpr (kind != INT8) sum = fma(scale.low, splat(x.total_scaled[at]), sum);
    products = __builtin_convertvector(first + last, floats) * scale.first;
  }
  return fma(products, splat(x.scale[at]), sum);
}

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
  // Where there is little to compute, the processor's own prefetching keeps up, except in superblocks.
  if constexpr (shared_bytes[kind] > 0 || (kind != FLOAT32 && tile >= 4)) prefetch_group<kind>(from, scales);
  if constexpr (kind == FLOAT32) {
    const float* input = x.exact.data() + first * x.width + group * GROUP;
    for (int i = 0; i < GROUP; i += 2) {
      floats even = load<floats>(from + 64 * i), odd = load<floats>(from + 64 * i + 64);
#pragma GCC unroll 8
      for (int row = 0; row < tile; row++) {
        sums[row] = fma(even, splat(input[row * x.width + i]), sums[row]);
        sums[tile + row] = fma(odd, splat(input[row * x.width + i + 1]), sums[tile + row]);
      }
    }
  } else if constexpr (kind == BFLOAT16) {
    const Half* input = x.rounded.data() + first * x.width + group * GROUP;
    for (int i = 0; i < 16; i += 2) {
      ints even = load<ints>(from + 64 * i), odd = load<ints>(from + 64 * i + 64);
#pragma GCC unroll 8
      for (int row = 0; row < tile; row++) {
        sums[row] = dot(sums[row], even, input + row * x.width + 2 * i);
        sums[tile + row] = dot(sums[tile + row], odd, input + row * x.width + 2 * i + 2);
      }
    }
  } else {
    bytes codes[8];
    unpack_group<kind>(from, codes);
    Scales scale = scales_of<kind>(scales, group);
#if defined(MMSPEC_I8MM)
    ints pairs[tile];
    bool paired = kind <= INT8 && tile > 1 && has_i8mm;
    if (paired)
      dot_pairs(codes, kind == INT8 ? 128 : 0, x.codes.data() + first * x.width + group * GROUP, x.width, tile, pairs);
#else
    constexpr bool paired = false;
    const ints* pairs = nullptr;
#endif
#pragma GCC unroll 8
    for (int row = 0; row < tile; row++) {
      int64_t at = (first + row) * x.groups + group;
      const int8_t* input = x.codes.data() + (first + row) * x.width + group * GROUP;
      ints part[2] = {};
      if constexpr (kind > FLOAT32)
        dot_halves(codes, input, part);
      else
        part[0] = paired ? pairs[row] : dot<kind>(codes, input, x.total[at]);
      sums[row] = add_scaled<kind>(sums[row], part[0], part[1], scale, x, at);
    }
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

#if defined(MMSPEC_AMX)
// Estimated: a simpler kernel was as fast as VNNI with 8 rows, and faster with 16.
constexpr int LEAST_ROWS = 8;

// As ``block_product``, with the same bits. Several groups are unpacked, multiplied and scaled at a time, so that no
// instruction waits for the one before.
template <Kind kind>
void add_quantised_tiles(Tiles& tiles, int rows, const uint8_t* block, const Rows& x, int64_t first, floats* sums) {
  constexpr int64_t STRETCH = 8, PARTS = kind == Q6_K ? 2 : 1, DEPTH = GROUP / PARTS;
  bytes codes[STRETCH][8];
  ints products[STRETCH][PARTS][MOST_ROWS];
  Scales scale[STRETCH];
  floats local[MOST_ROWS] = {};
  tiles.configure(rows, DEPTH);
  for (int64_t start = 0; start < x.groups; start += STRETCH) {
    int64_t count = std::min(STRETCH, x.groups - start);
    for (int64_t i = 0; i < count; i++) {
      auto [from, scales] = group_at<kind>(block, start + i);
      prefetch_group<kind>(from, scales);
      unpack_group<kind>(from, codes[i]);
      scale[i] = scales_of<kind>(scales, start + i);
    }
    const int8_t* input = x.codes.data() + first * x.width + start * GROUP;
    multiply_tiles(input, x.width, (const uint8_t*)codes, DEPTH, count * PARTS, products[0][0]);
    for (int row = 0; row < rows; row++) {
      floats sum = local[row];
      for (int64_t i = 0; i < count; i++) {
        int64_t at = (first + row) * x.groups + start + i;
        ints last = PARTS > 1 ? products[i][PARTS - 1][row] : ints{} - (kind == INT8 ? 128 * x.total[at] : 0);
        sum = add_scaled<kind>(sum, products[i][0][row], last, scale[i], x, at);
      }
      local[row] = sum;
    }
  }
  for (int row = 0; row < rows; row++) sums[row] += local[row];
}

// Adds products in tile registers; returns false, without any, where other kernels are faster or the only ones.
template <Kind kind>
bool add_by_tiles(Tiles& tiles, int rows, const uint8_t* block, const Rows& x, int64_t first, floats* sums) {
  if (!has_tiles || kind == FLOAT32 || (kind != BFLOAT16 && rows < LEAST_ROWS)) return false;
  if constexpr (kind == BFLOAT16) {
    tiles.configure(rows, 2 * GROUP);
    add_bfloat16_tiles(x.rounded.data() + first * x.width, x.width, block, x.groups, rows, sums);
  } else if constexpr (kind != FLOAT32) {
    add_quantised_tiles<kind>(tiles, rows, block, x, first, sums);
  }
  return true;
}
#else
template <Kind>
bool add_by_tiles(Tiles&, int, const uint8_t*, const Rows&, int64_t, floats*) {
  return false;
}
#endif

// out = x W^T + bias (+ residual); called by all threads of a team.
template <Kind kind>
void product_of(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual) {
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
        for (int i = 0; i < count; i++) sums[i] = bias;
        if (!add_by_tiles<kind>(tiles, count, weights, x, first, sums))
          for (int i = 0; i < count; i += TILE)
            tile_product<kind>(std::min(int(TILE), count - i), weights, column % BLOCK, x, first + i, sums + i);
        for (int i = 0; i < count; i++) {
          int64_t at = (first + i) * layer.out + column;
          floats earlier{};
          if (residual) std::memcpy(&earlier, residual + at, columns * sizeof(float));
          earlier += sums[i];
          std::memcpy(out + at, &earlier, columns * sizeof(float));
        }
      }
    }
}

void product_of_kind(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual) {
  if (layer.kind == INT4) return product_of<INT4>(layer, x, rows, out, residual);
  if (layer.kind == INT8) return product_of<INT8>(layer, x, rows, out, residual);
  if (layer.kind == FLOAT32) return product_of<FLOAT32>(layer, x, rows, out, residual);
  if (layer.kind == Q5) return product_of<Q5>(layer, x, rows, out, residual);
  if (layer.kind == Q4_K) return product_of<Q4_K>(layer, x, rows, out, residual);
  if (layer.kind == Q5_K) return product_of<Q5_K>(layer, x, rows, out, residual);
  if (layer.kind == Q6_K) return product_of<Q6_K>(layer, x, rows, out, residual);
  product_of<BFLOAT16>(layer, x, rows, out, residual);
}

void product(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual = nullptr) {
  for (const Linear* part = &layer; part; out += part->features, part = part->rest) {
    product_of_kind(*part, x, rows, out, residual);
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

// act(gate) * up as the inputs of a layer, act being silu or gelu; ``in`` is a multiple of 32.
void take_gated(const Linear& layer, Rows& x, const float* gate_up, int64_t rows, bool with_gelu) {
#pragma omp for schedule(static) collapse(2)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < x.groups; group++) {
      const float* gate = gate_up + 2 * row * layer.in + group * GROUP;
      float gated[GROUP];
      for (int64_t i = 0; i < GROUP; i += LANES) {
        floats z = load<floats>(gate + i);
        store(gated + i, (with_gelu ? gelu(z) : silu(z)) * load<floats>(gate + layer.in + i));
      }
      x.set(Kind(layer.kind), row, group, gated);
    }
}

}  // namespace
