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

#include <vector>

#include "formats.h"
#include "pair_products.h"
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
#define MMSPEC_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// ``add_group`` for codes of 4 to 6 bits in a format of GGUF.
template <Kind kind, int tile>
inline void add_gguf_group(const uint8_t* from, const uint8_t* scales, const Rows& x, int64_t first, int64_t group,
                           floats* sums) {
  bytes codes[8];
  unpack<int(code_bytes[kind] - 256) / 64>(from, from + 256, codes);
  const uint8_t* shared = scales + (together[kind] - group % together[kind]) * scale_bytes[kind];
  Scales scale = kind == Q5 ? group_scales(scales, scales + 2 * BLOCK)
                            : superblock_scales<kind == Q6_K>(scales, shared, shared + 2 * BLOCK);
#pragma GCC unroll 8
  for (int row = 0; row < tile; row++) {
    int64_t at = (first + row) * x.groups + group;
    ints part[2];
    dot_halves(codes, x.codes.data() + (first + row) * x.width + group * GROUP, part);
    floats products;
    if constexpr (kind == Q6_K) {
      part[0] -= 32 * x.first_total[at], part[1] -= 32 * (x.total[at] - x.first_total[at]);
      products = __builtin_convertvector(part[0], floats) * scale.first;
      products = fma(__builtin_convertvector(part[1], floats), scale.last, products);
    } else {
      sums[row] = fma(scale.low, splat(x.total_scaled[at]), sums[row]);
      products = __builtin_convertvector(part[0] + part[1], floats) * scale.first;
    }
    sums[row] = fma(products, splat(x.scale[at]), sums[row]);
  }
}

// Adds the products of one group of LANES output features and the same group of several rows, for which weights are
// loaded once.
template <Kind kind, int tile>
inline void add_group(const uint8_t* from, const uint8_t* scales, const Rows& x, int64_t first, int64_t group,
                      floats* sums) {
  // Where there is little to compute, the processor's own prefetching keeps up, except in superblocks. Into the second
  // level cache: the first one's lines are taken by loads.
  if constexpr (shared_bytes[kind] > 0 || (kind != FLOAT32 && tile >= 4)) {
    constexpr int64_t ahead = block_bytes(kind, AHEAD);
    for (int64_t i = 0; i < code_bytes[kind]; i += 64) __builtin_prefetch(from + ahead + i, 0, 2);
    if constexpr (scale_bytes[kind] > 0) __builtin_prefetch(scales + ahead, 0, 2);
  }
  if constexpr (kind > FLOAT32) {
    add_gguf_group<kind, tile>(from, scales, x, first, group, sums);
  } else if constexpr (kind == FLOAT32) {
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
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
      if constexpr (kind == INT8) {
        codes[i] = load<bytes>(from + 64 * i);
      } else {
        bytes both = load<bytes>(from + 64 * (i / 2));
        codes[i] = i % 2 ? both >> 4 : both & 15;
      }
    }
    floats scale = widen(load<halves>(scales)), low{};
    if constexpr (kind == INT4) low = widen(load<halves>(scales + 2 * BLOCK));
#if defined(MMSPEC_I8MM)
    ints pairs[tile];
    bool paired = tile > 1 && has_i8mm;
    if (paired)
      dot_pairs(codes, kind == INT8 ? 128 : 0, x.codes.data() + first * x.width + group * GROUP, x.width, tile, pairs);
#else
    constexpr bool paired = false;
    const ints* pairs = nullptr;
#endif
#pragma GCC unroll 8
    for (int row = 0; row < tile; row++) {
      int64_t at = (first + row) * x.groups + group;
      ints sum = paired ? pairs[row]
                        : dot<kind>(codes, x.codes.data() + (first + row) * x.width + group * GROUP, x.total[at]);
      if constexpr (kind == INT4) sums[row] = fma(low, splat(x.total_scaled[at]), sums[row]);
      sums[row] = fma(__builtin_convertvector(sum, floats) * scale, splat(x.scale[at]), sums[row]);
    }
  }
}

// LANES output features of a block, from ``part`` on.
template <Kind kind, int tile>
void block_product(const uint8_t* block, int64_t part, const Rows& x, int64_t first, floats* sums) {
  floats local[2 * tile] = {};
  for (int64_t group = 0; group < x.groups; group++) {
    int64_t place = group % together[kind];
    const uint8_t *codes = block + block_bytes(kind, group - place), *scales = codes + together[kind] * code_bytes[kind];
    codes += place * code_bytes[kind] + 4 * part, scales += place * scale_bytes[kind] + 2 * part;
    add_group<kind, tile>(codes, scales, x, first, group, local);
  }
  for (int row = 0; row < tile; row++) sums[row] += local[row] + local[tile + row];
}

template <Kind kind, int tile = TILE>
void tile_product(int rows, const uint8_t* block, int64_t part, const Rows& x, int64_t first, floats* sums) {
  if constexpr (tile > 1)
    if (rows < tile) return tile_product<kind, tile - 1>(rows, block, part, x, first, sums);
  block_product<kind, tile>(block, part, x, first, sums);
}

// out = x W^T + bias (+ residual); called by all threads of a team.
template <Kind kind>
void product_of(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual) {
  int64_t block_size = block_bytes(kind, x.groups);
#pragma omp for schedule(static)
  for (int64_t block = 0; block < (layer.features + BLOCK - 1) / BLOCK; block++)
    for (int64_t column = block * BLOCK; column < std::min(block * BLOCK + BLOCK, layer.features); column += LANES) {
      int64_t columns = std::min(LANES, layer.features - column);
      floats bias{};
      if (layer.bias) std::memcpy(&bias, layer.bias + column, columns * sizeof(float));
      for (int64_t first = 0; first < rows; first += TILE) {
        int tile = int(std::min(TILE, rows - first));
        floats sums[TILE];
        for (int i = 0; i < tile; i++) sums[i] = bias;
        tile_product<kind>(tile, layer.blocks + block * block_size, column % BLOCK, x, first, sums);
        for (int i = 0; i < tile; i++) {
          int64_t at = (first + i) * layer.out + column;
          floats earlier{};
          if (residual) std::memcpy(&earlier, residual + at, columns * sizeof(float));
          earlier += sums[i];
          std::memcpy(out + at, &earlier, columns * sizeof(float));
        }
      }
    }
}

#if defined(MMSPEC_AMX)
// Linux grants a process its tile registers on request.
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;

// Registers 0 to 3 are sums (rows, 16), 4 inputs (rows, 32), 5 weights: a group of a block as it lies in memory.
void configure_tiles(int rows) {
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 6; tile++) config[16 + 2 * tile] = 64, config[48 + tile] = tile < 5 ? rows : 16;
  _tile_loadconfig(config);
}

// The intrinsics take numbers of registers as literals only.
#define MMSPEC_ADD_TILE(sum, weights, input, width) \
  for (int64_t i = 0; i < 1024; i += 64) __builtin_prefetch((weights) + 8192 + i); \
  _tile_loadd(4, input, (width) * sizeof(Half)); \
  _tile_loadd(5, weights, 64); \
  _tile_dpbf16ps(sum, 4, 5)

// As ``product_of`` for bfloat16; up to 16 rows cost little more than one.
void product_by_tiles(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual) {
  int64_t configured = 0;
#pragma omp for schedule(static)
  for (int64_t block = 0; block < (layer.features + BLOCK - 1) / BLOCK; block++)
    for (int64_t first = 0; first < rows; first += 16) {
      int64_t count = std::min<int64_t>(rows - first, 16);
      if (count != configured) configure_tiles(int(configured = count));
      const uint8_t* weights = layer.blocks + block * x.groups * 1024;
      const Half* input = x.rounded.data() + first * x.width;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      int64_t group = 0;
      for (; group + 4 <= x.groups; group += 4) {
        MMSPEC_ADD_TILE(0, weights + group * 1024, input + group * GROUP, x.width);
        MMSPEC_ADD_TILE(1, weights + group * 1024 + 1024, input + group * GROUP + GROUP, x.width);
        MMSPEC_ADD_TILE(2, weights + group * 1024 + 2048, input + group * GROUP + 2 * GROUP, x.width);
        MMSPEC_ADD_TILE(3, weights + group * 1024 + 3072, input + group * GROUP + 3 * GROUP, x.width);
      }
      for (; group < x.groups; group++) {
        MMSPEC_ADD_TILE(0, weights + group * 1024, input + group * GROUP, x.width);
      }
      alignas(64) float sums[4][16 * BLOCK];
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      int64_t columns = std::min(BLOCK, layer.features - block * BLOCK);
      floats bias{};
      if (layer.bias) std::memcpy(&bias, layer.bias + block * BLOCK, columns * sizeof(float));
      for (int64_t i = 0; i < count; i++) {
        int64_t at = (first + i) * layer.out + block * BLOCK;
        floats total = (load<floats>(sums[0] + i * BLOCK) + load<floats>(sums[1] + i * BLOCK)) +
                       (load<floats>(sums[2] + i * BLOCK) + load<floats>(sums[3] + i * BLOCK));
        floats earlier{};
        if (residual) std::memcpy(&earlier, residual + at, columns * sizeof(float));
        earlier += total + bias;
        std::memcpy(out + at, &earlier, columns * sizeof(float));
      }
    }
  _tile_release();
}
#endif

void product_of_kind(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual) {
#if defined(MMSPEC_AMX)
  if (layer.kind == BFLOAT16 && has_tiles) return product_by_tiles(layer, x, rows, out, residual);
#endif
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
