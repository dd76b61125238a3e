// Dot products of a group's codes with inputs, by the instructions at hand.

#pragma once

#include "formats.h"
#include "pair_products.h"
#include "vectors.h"

namespace {

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

}  // namespace
