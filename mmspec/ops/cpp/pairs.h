// bfloat16 vectors and dot products of bfloat16 pairs.

#pragma once

#include <utility>

#include "vectors.h"

namespace {

typedef uint32_t words __attribute__((vector_size(4 * LANES)));       // pairs of bfloat16
typedef uint64_t longs __attribute__((vector_size(4 * LANES)));
typedef uint16_t row_halves __attribute__((vector_size(4 * LANES)));  // bfloat16
typedef uint16_t eight __attribute__((vector_size(16)));

constexpr int64_t PAIRED = 2 * LANES;  // bfloat16 of a vector

// accumulator + dot product of two bfloat16 pairs, first elements first
inline floats dot(floats accumulator, words a, words b) {
#if defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
  return reinterpret_cast<floats>(_mm512_dpbf16_ps((__m512)accumulator, (__m512bh)a, (__m512bh)b));
#else
  accumulator = fma(reinterpret_cast<floats>(a << 16), reinterpret_cast<floats>(b << 16), accumulator);
  return fma(reinterpret_cast<floats>(a & 0xffff0000), reinterpret_cast<floats>(b & 0xffff0000), accumulator);
#endif
}

// To bfloat16, to nearest, ties to even.
inline words rounded(floats x) {
  words bits = reinterpret_cast<words>(x);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline halves to_halves(floats x) {
#if defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
  return reinterpret_cast<halves>(_mm512_cvtneps_pbh((__m512)x));
#else
  return __builtin_convertvector(rounded(x), halves);
#endif
}

// 2^x for x <= 0: to the precision of bfloat16, by a Taylor polynomial of degree 4.
inline floats power_of_two(floats x) {
  x = x > -126.0f ? x : splat(-126.0f);
  floats n = x + OFFSET;  // rounded to an integer in the low bits
  ints power = reinterpret_cast<ints>(n) << 23;
  floats r = x - (n - OFFSET), p = splat(9.618129e-3f);
  for (float factor : {5.550411e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f}) p = fma(p, r, splat(factor));
  return as_floats(reinterpret_cast<ints>(p) + power);
}

inline void store_rounded(uint16_t* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    halves value = __builtin_convertvector(rounded(load<floats>(from + i)), halves);
    std::memcpy(to + i, &value, sizeof value);
  }
}

// Interleaves the elements of x and y, from the lower and upper half of each 128 bits.
template <class T, size_t... i>
inline std::pair<T, T> interleaved(T x, T y, std::index_sequence<i...>) {
  constexpr size_t all = sizeof...(i), lane = all * 16 / sizeof(T);
  constexpr auto place = [](size_t at) { return at / lane * lane + at % lane / 2 + at % 2 * all; };
  return {__builtin_shufflevector(x, y, place(i)...), __builtin_shufflevector(x, y, (place(i) + lane / 2)...)};
}

template <class T>
inline std::pair<T, T> interleaved(T x, T y) {
  return interleaved(x, y, std::make_index_sequence<sizeof(T) / sizeof(x[0])>());
}

// ``interleaved`` in elements of ``Unit``.
template <class To, class Unit, class T>
inline std::pair<To, To> interleaved_as(T x, T y) {
  auto [low, high] = interleaved(reinterpret_cast<Unit>(x), reinterpret_cast<Unit>(y));
  return {reinterpret_cast<To>(low), reinterpret_cast<To>(high)};
}

// 16 bytes of every fourth row.
inline words load_quarters(const uint8_t* const* rows, int64_t first) {
  auto load_eight = [&](int64_t i) { return load<eight>(rows[4 * i] + first); };
#if defined(__AVX512F__)
  __m512i all = _mm512_castsi128_si512((__m128i)load_eight(0));
  all = _mm512_inserti32x4(all, (__m128i)load_eight(1), 1);
  all = _mm512_inserti32x4(all, (__m128i)load_eight(2), 2);
  return reinterpret_cast<words>(_mm512_inserti32x4(all, (__m128i)load_eight(3), 3));
#else
  eight low = load_eight(0), high = load_eight(1);
  return reinterpret_cast<words>(
      __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
#endif
}

// The first bytes of a row, zeros after them.
template <class T>
inline T load_first(const uint8_t* from, int64_t count) {
  if (count >= int64_t(sizeof(T))) return load<T>(from);
  T value{};
  std::memcpy(&value, from, count);
  return value;
}

}  // namespace
