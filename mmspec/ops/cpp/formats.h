// Storage formats of weights.
//
// Weights are stored in blocks of 16 output features, which are read sequentially, for the hardware prefetcher. A block
// is a sequence of groups of 32 input features:
//   int4      256 bytes of codes, 16 scales, 16 values of code 0 (float16): the layout of GGUF's Q4_1, transposed
//   int8      per two groups: 512 bytes of codes plus 128 each, 16 scales (float16) each: Q8_0
//   bfloat16  1024 bytes
//   float32   2048 bytes
//   q5        256 bytes of codes' low 4 bits, 64 of their fifth bit, 16 scales, 16 values of code 0: Q5_0 and Q5_1
//   mxfp4     per four groups: 256 bytes of codes each, 16 exponents (uint8) each: MXFP4
//   q4_k, q5_k, q6_k  superblocks of 8 groups: codes; 16 pairs of factors (uint8) for each group; 16 d, 16 dmin (float16)
// In the K formats, factors times d and -dmin are a group's scale and value of code 0. q6_k has factors (int8) for the
// first and last 16 features, and codes with an offset of 32. Codes of mxfp4 are indices of 16 values.
// Within a group, 4 input features (bfloat16: 2, float32: 1) of all 16 output features are adjacent, as the operand of
// a dot product instruction. Inputs are quantised to int8 per row and group, except for bfloat16 and float32.

#pragma once

#include <utility>

#include "vectors.h"

extern "C" {

struct Linear {
  const uint8_t* blocks;
  const float* bias;  // may be null
  int64_t kind, in, out;
  int64_t features;    // number of leading output features of this kind
  const Linear* rest;  // following output features, of other quantised kinds; null: none
};

}  // extern "C"

namespace {

constexpr int64_t BLOCK = 16, GROUP = 32;
constexpr int PARTS = BLOCK / LANES;  // vectors per block

enum Kind : int64_t { INT4, INT8, BFLOAT16, FLOAT32, Q5, Q4_K, Q5_K, Q6_K, MXFP4 };

inline int64_t groups_of(int64_t features) { return (features + GROUP - 1) / GROUP; }

// Bytes of codes and scales per group; number of groups whose scales share a cache line, so that no load crosses one;
// bytes that such groups share.
constexpr int64_t code_bytes[] = {256, 512, 1024, 2048, 320, 256, 320, 384, 256};
constexpr int64_t scale_bytes[] = {64, 32, 0, 0, 64, 32, 32, 32, 16};
constexpr int64_t together[] = {1, 2, 1, 1, 1, 8, 8, 8, 4}, shared_bytes[] = {0, 0, 0, 0, 0, 64, 64, 64, 0};

constexpr int64_t block_bytes(Kind kind, int64_t groups) {
  return (groups + together[kind] - 1) / together[kind] *
         (together[kind] * (code_bytes[kind] + scale_bytes[kind]) + shared_bytes[kind]);
}

// The outputs from ``first`` on, a multiple of BLOCK, of a single-kind layer.
inline Linear outputs_from(const Linear& layer, int64_t first) {
  int64_t skipped = first / BLOCK * block_bytes(Kind(layer.kind), groups_of(layer.in));
  int64_t left = layer.out - first;
  return {layer.blocks + skipped, layer.bias ? layer.bias + first : nullptr, layer.kind, layer.in, left, left, nullptr};
}

// Twice the value of each code of mxfp4, plus MXFP4_CENTRE.
constexpr int MXFP4_CENTRE = 12;
alignas(16) constexpr uint8_t MXFP4_VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

inline bytes mxfp4_values(bytes codes) {
#if defined(__AVX512BW__) && !defined(MMSPEC_PORTABLE)
  __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)MXFP4_VALUES));
  return reinterpret_cast<bytes>(_mm512_shuffle_epi8(table, (__m512i)codes));
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(MMSPEC_PORTABLE)
  __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)MXFP4_VALUES));
  return reinterpret_cast<bytes>(_mm256_shuffle_epi8(table, (__m256i)codes));
#else
  for (int64_t i = 0; i < 4 * LANES; i++) codes[i] = MXFP4_VALUES[codes[i]];
  return codes;
#endif
}

// Half the power of two of an exponent of mxfp4: 2^(exponent - 128).
inline float mxfp4_scale(uint8_t exponent) {
  uint32_t bits = exponent < 2 ? 0x200000u << exponent : uint32_t(exponent - 1) << 23;
  return load<float>(&bits);
}

// Codes of a group's input features from 4 i on, 4 per lane: whole bytes, or low 4 bits followed by planes of 64 bytes
// with the remaining bits.
template <Kind kind>
inline bytes codes_at(const uint8_t* from, int i) {
  if (kind == INT8) return load<bytes>(from + 64 * i);
  constexpr int high = int(code_bytes[kind] - 256) / 64;
  bytes both = load<bytes>(from + 64 * (i / 2)), codes = i % 2 ? both >> 4 : both & 15;
  if constexpr (kind == MXFP4) return mxfp4_values(codes);
  if (high == 0) return codes;
  bytes plane = load<bytes>(from + 256 + 64 * (i * high / 8));
  int shift = 4 - i * high % 8;
  return codes | ((shift > 0 ? plane << shift : plane >> -shift) & uint8_t(((1 << high) - 1) << 4));
}

// Scales of the first and last 16 features of a group, and the value of code 0.
struct Scales {
  floats first, last, low;
};

// Q5_0 and Q5_1: a scale and a value of code 0 for each output feature.
inline Scales group_scales(const uint8_t* scale, const uint8_t* low) {
  floats whole = widen(load<halves>(scale));
  return {whole, whole, widen(load<halves>(low))};
}

// K formats: factors per group of d and dmin per superblock.
template <bool halved>
inline Scales superblock_scales(const uint8_t* factors, const uint8_t* d, const uint8_t* dmin) {
  ints pair = __builtin_convertvector(load<halves>(factors), ints);
  floats whole = widen(load<halves>(d));
  if constexpr (halved)
    return {whole * __builtin_convertvector(pair << 24 >> 24, floats),
            whole * __builtin_convertvector(pair << 16 >> 24, floats), floats{}};
  floats scale = whole * __builtin_convertvector(pair & 255, floats);
  return {scale, scale, -widen(load<halves>(dmin)) * __builtin_convertvector(pair >> 8, floats)};
}

template <Kind kind>
inline Scales scales_of(const uint8_t* scales, int64_t group) {
  if constexpr (kind == MXFP4) {
    floats scale;
    for (int64_t lane = 0; lane < LANES; lane++) scale[lane] = mxfp4_scale(scales[lane]);
    return {scale, floats{}, floats{}};
  }
  if constexpr (kind == INT8) return {widen(load<halves>(scales)), floats{}, floats{}};
  if constexpr (kind == INT4 || kind == Q5) return group_scales(scales, scales + 2 * BLOCK);
  const uint8_t* shared = scales + (together[kind] - group % together[kind]) * scale_bytes[kind];
  return superblock_scales<kind == Q6_K>(scales, shared, shared + 2 * BLOCK);
}

// Codes and scales of a group of a block.
template <Kind kind>
inline std::pair<const uint8_t*, const uint8_t*> group_at(const uint8_t* block, int64_t group) {
  int64_t place = group % together[kind];
  block += block_bytes(kind, group - place);
  return {block + place * code_bytes[kind], block + together[kind] * code_bytes[kind] + place * scale_bytes[kind]};
}

}  // namespace
