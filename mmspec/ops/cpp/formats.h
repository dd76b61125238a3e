// Weights in the formats of GGUF with codes of 4 to 6 bits: how a group's codes and scales are read.

#pragma once

#include "vectors.h"

namespace {

// Codes of a group, from their low 4 bits and from planes of 64 bytes with ``high`` further bits.
template <int high>
inline void unpack(const uint8_t* low, const uint8_t* planes, bytes (&codes)[8]) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    bytes both = load<bytes>(low + 64 * (i / 2));
    codes[i] = i % 2 ? both >> 4 : both & 15;
    if constexpr (high > 0) {
      bytes plane = load<bytes>(planes + 64 * (i * high / 8));
      int shift = 4 - i * high % 8;
      codes[i] |= (shift > 0 ? plane << shift : plane >> -shift) & uint8_t(((1 << high) - 1) << 4);
    }
  }
}

// Scales of a group's first and last 16 features, and its value of code 0.
struct Scales {
  floats first, last, low;
};

// Q5_0 and Q5_1: a scale and a value of code 0 for each output feature.
inline Scales group_scales(const uint8_t* scale, const uint8_t* low) {
  floats whole = widen(load<halves>(scale));
  return {whole, whole, widen(load<halves>(low))};
}

// The K formats: factors, which belong to a group, of d and dmin, which belong to a superblock.
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

// sums += the products of a group's codes with the first and with the last 16 inputs
inline void dot_halves(const bytes (&codes)[8], const int8_t* inputs, ints (&sums)[2]) {
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(MMSPEC_PORTABLE)
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {  // 2 sums of two products, of at most 63 * 127, fit in 16 bits
    __m256i pairs = _mm256_add_epi16(
        _mm256_maddubs_epi16((__m256i)codes[i], _mm256_set1_epi32(load<int32_t>(inputs + 4 * i))),
        _mm256_maddubs_epi16((__m256i)codes[i + 1], _mm256_set1_epi32(load<int32_t>(inputs + 4 * i + 4))));
    sums[i / 4] += reinterpret_cast<ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
#else
  for (int i = 0; i < 32; i++)
    for (int lane = 0; lane < LANES; lane++) sums[i / 16][lane] += int32_t(codes[i / 4][4 * lane + i % 4]) * inputs[i];
#endif
}

}  // namespace
