// Dot products of a group's codes with inputs, with the best available instructions.

#pragma once

#include "formats.h"
#include "pair_products.h"
#include "vectors.h"

namespace {

#if defined(MMSPEC_PORTABLE)
constexpr const char* INSTRUCTIONS = "portable";
#elif defined(__AVX512VNNI__)
#define MMSPEC_VNNI
constexpr const char* INSTRUCTIONS = "AVX-512 VNNI";
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
#define MMSPEC_VNNI
constexpr const char* INSTRUCTIONS = "AVX-VNNI";
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define MMSPEC_AVX2
constexpr const char* INSTRUCTIONS = "AVX2";
#else
constexpr const char* INSTRUCTIONS = "others";
#endif
#if defined(MMSPEC_VNNI)
constexpr bool VNNI = true;  // VNNI takes unsigned codes
#else
constexpr bool VNNI = false;
#endif
constexpr int32_t START = VNNI ? 0x4b400000 : 0;  // initial value of sums: the bits of OFFSET

// sum + dot products of codes, 4 input features per lane, with inputs
template <Kind kind>
inline ints dot(ints sum, bytes codes, const int8_t* inputs) {
#if defined(MMSPEC_VNNI) && defined(__AVX512F__)
  return reinterpret_cast<ints>(
      _mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(load<int32_t>(inputs))));
#elif defined(MMSPEC_VNNI)
  return reinterpret_cast<ints>(
      _mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, _mm256_set1_epi32(load<int32_t>(inputs))));
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(MMSPEC_PORTABLE)
  int32x4_t halves[2];
  int8x16_t weights[2];
  std::memcpy(halves, &sum, sizeof sum);
  std::memcpy(weights, &codes, sizeof weights);
  for (int half = 0; half < 2; half++) {
    if constexpr (kind == INT8) weights[half] = veorq_s8(weights[half], vdupq_n_s8(-128));
    halves[half] = vdotq_s32(halves[half], weights[half], vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(inputs))));
  }
  return load<ints>(halves);
#elif defined(MMSPEC_AVX2)
  __m256i input = _mm256_set1_epi32(load<int32_t>(inputs)), weights = (__m256i)codes;
  if (kind == INT8) {
    weights = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    input = _mm256_sign_epi8(input, weights), weights = _mm256_abs_epi8(weights);
  }
  return sum + reinterpret_cast<ints>(_mm256_madd_epi16(_mm256_maddubs_epi16(weights, input), _mm256_set1_epi16(1)));
#else
  for (int i = 0; i < 4; i++)
    for (int lane = 0; lane < LANES; lane++)
      sum[lane] += (codes[4 * lane + i] - (kind == INT8 ? 128 : 0)) * inputs[i];
  return sum;
#endif
}

// sum + dot products of 4 int8 per lane with factors of at most 127
inline ints dot_signed(ints sum, bytes values, const uint8_t* factors) {
#if defined(MMSPEC_VNNI) && defined(__AVX512F__)
  __m512i left = _mm512_set1_epi32(load<int32_t>(factors));
  return reinterpret_cast<ints>(_mm512_dpbusd_epi32((__m512i)sum, left, (__m512i)values));
#elif defined(MMSPEC_VNNI)
  __m256i left = _mm256_set1_epi32(load<int32_t>(factors));
  return reinterpret_cast<ints>(_mm256_dpbusd_avx_epi32((__m256i)sum, left, (__m256i)values));
#elif defined(MMSPEC_AVX2)
  __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi32(load<int32_t>(factors)), (__m256i)values);
  return sum + reinterpret_cast<ints>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
  return dot<INT8>(sum, values ^ uint8_t(128), reinterpret_cast<const int8_t*>(factors));
#endif
}

// sums (rows, PARTS, 2) += products of a block's codes in a group with the inputs of several rows; for Q6_K, separately
// for the first and last 16 inputs. Inputs are loaded once for all parts, as loads are the bottleneck.
template <Kind kind, int rows>
inline void dot_rows(const uint8_t* from, const int8_t* inputs, ints (&sums)[rows][PARTS][2]) {
#if defined(MMSPEC_I8MM)
  if (kind <= INT8 && rows > 1 && has_i8mm) {
    for (int part = 0; part < PARTS; part++) {
      bytes codes[8];
      for (int i = 0; i < 8; i++) codes[i] = codes_at<kind>(from + 4 * LANES * part, i);
      ints pairs[rows];
      dot_pairs(codes, kind == INT8 ? 128 : 0, inputs, GROUP, rows, pairs);
      for (int row = 0; row < rows; row++) sums[row][part][0] += pairs[row];
    }
    return;
  }
#endif
#if defined(MMSPEC_AVX2)
  // number of sums of two products, at most 15, 24, 31, 63 or 128 times 127 each, that fit in 16 bits
  constexpr int deep = kind == INT8 ? 1 : kind == MXFP4 ? 4 : 8 >> (code_bytes[kind] - 256) / 64;
  __m256i pairs[rows][PARTS], ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    __m256i codes[PARTS];
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      codes[part] = (__m256i)codes_at<kind>(from + 4 * LANES * part, i);
      if (kind == INT8) codes[part] = _mm256_xor_si256(codes[part], _mm256_set1_epi8(-128));
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++) {
      __m256i input = _mm256_set1_epi32(load<int32_t>(inputs + row * GROUP + 4 * i));
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        __m256i weights = kind == INT8 ? _mm256_abs_epi8(codes[part]) : codes[part];
        __m256i pair = _mm256_maddubs_epi16(weights, kind == INT8 ? _mm256_sign_epi8(input, codes[part]) : input);
        if (i % deep > 0) pair = _mm256_add_epi16(pairs[row][part], pair);
        pairs[row][part] = pair;
        if (i % deep == deep - 1)
          sums[row][part][kind == Q6_K ? i / 4 : 0] += reinterpret_cast<ints>(_mm256_madd_epi16(pair, ones));
      }
    }
  }
#else
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    bytes codes[PARTS];
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) codes[part] = codes_at<kind>(from + 4 * LANES * part, i);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; part++) {
        ints& sum = sums[row][part][kind == Q6_K ? i / 4 : 0];
        sum = dot<kind>(sum, codes[part], inputs + row * GROUP + 4 * i);
      }
  }
#endif
}

// Inputs for bfloat16 weights, rounded to bfloat16; bfloat16 instructions take them in pairs.
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

// accumulator + dot product of 2 bfloat16 weights per lane with 2 inputs
inline floats dot(floats accumulator, ints weights, const Half* inputs) {
#if defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
  return reinterpret_cast<floats>(
      _mm512_dpbf16_ps((__m512)accumulator, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(load<int32_t>(inputs))));
#else
  accumulator = fma(as_floats(weights << 16), splat(inputs[0]), accumulator);
  return fma(as_floats(weights & int32_t(0xffff0000)), splat(inputs[1]), accumulator);
#endif
}

}  // namespace
