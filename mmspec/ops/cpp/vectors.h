// Vectors of floats and integers, for AVX-512, AVX2 or any processor.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

// Floats per vector register.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// An array aligned to a cache line.
template <class T>
class Lines {
 public:
  Lines() = default;
  Lines(const Lines&) = delete;
  Lines& operator=(const Lines&) = delete;
  ~Lines() { std::free(data_); }

  // Allocates space; may discard contents.
  void reserve(int64_t size) {
    if (size <= size_) return;
    std::free(data_);
    size_ = size, data_ = static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64));
  }

  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

inline void store(float* to, floats value) { std::memcpy(to, &value, sizeof value); }
inline floats splat(float value) { return value - floats{}; }
inline floats as_floats(ints value) { return reinterpret_cast<floats>(value); }

inline floats fma(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return reinterpret_cast<floats>(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
#elif defined(__FMA__)
  return reinterpret_cast<floats>(_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c));
#elif defined(__aarch64__)
  float32x4_t parts[3][2];
  std::memcpy(parts[0], &a, sizeof a), std::memcpy(parts[1], &b, sizeof b), std::memcpy(parts[2], &c, sizeof c);
  for (int i = 0; i < 2; i++) parts[2][i] = vfmaq_f32(parts[2][i], parts[0][i], parts[1][i]);
  return load<floats>(parts[2]);
#else
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// A float whose last 23 bits count units: adding an integer below 22 bits to its bits adds it to the float.
constexpr float OFFSET = 12582912;

inline float sum(floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  value += __builtin_shufflevector(value, value, 4, 5, 6, 7, 4, 5, 6, 7);
  value += __builtin_shufflevector(value, value, 2, 3, 2, 3, 4, 5, 6, 7);
  return value[0] + value[1];
#endif
}

// The sums of LANES vectors, each in a fixed order.
inline floats sums(const floats (&of)[LANES]) {
#if defined(__AVX512F__)
  floats a[8], b[4], c[2];
  for (int i = 0; i < 8; i++) {
    floats x = of[2 * i], y = of[2 * i + 1];
    a[i] = __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 4; i++) {
    floats x = a[2 * i], y = a[2 * i + 1];
    b[i] = __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  auto halved = [](floats x, floats y) {
    return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  };
  c[0] = halved(b[0], b[1]), c[1] = halved(b[2], b[3]);
  return halved(c[0], c[1]);
#else
  floats a[4], b[2];
  for (int i = 0; i < 4; i++) {
    floats x = of[2 * i], y = of[2 * i + 1];
    a[i] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 4, 12, 5, 13) +
           __builtin_shufflevector(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 2; i++)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(b[0], b[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(b[0], b[1], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

inline float greatest(floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  floats other = __builtin_shufflevector(value, value, 4, 5, 6, 7, 4, 5, 6, 7);
  value = value > other ? value : other;
  other = __builtin_shufflevector(value, value, 2, 3, 2, 3, 4, 5, 6, 7);
  value = value > other ? value : other;
  return std::max(value[0], value[1]);
#endif
}

// Bit i: whether value[i] > than[i].
inline uint32_t greater(floats value, floats than) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)value, (__m512)than, _CMP_GT_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)value, (__m256)than, _CMP_GT_OQ));
#endif
  uint32_t found = 0;
  for (int i = 0; i < LANES; i++) found |= uint32_t(value[i] > than[i]) << i;
  return found;
}

// float16 without infinities: the exponent is moved by a multiplication, which also covers subnormal numbers.
inline floats widen(halves value) {
#if defined(__AVX512F__)
  return reinterpret_cast<floats>(_mm512_maskz_cvtph_ps(0xffff, (__m256i)value));
#elif defined(__F16C__)
  return reinterpret_cast<floats>(_mm256_cvtph_ps((__m128i)value));
#endif
  ints bits = __builtin_convertvector(value, ints);
  return as_floats(((bits & 0x8000) << 16) | ((bits & 0x7fff) << 13)) * 0x1p112f;
}

// exp(x) for x <= 0: 2^n times the Taylor polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2].
inline floats exponential(floats x) {
  x = x < -87.0f ? splat(-87.0f) : x;
  floats n = x * 1.44269504f + OFFSET;  // rounded to an integer in the low bits
  ints power = reinterpret_cast<ints>(n) - 0x4b400000;
  n -= OFFSET;
  floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  floats p = splat(1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(factor));
  return as_floats(reinterpret_cast<ints>(p) + (power << 23));
}

inline ints lanes() {
  ints value;
  for (int i = 0; i < LANES; i++) value[i] = i;
  return value;
}

// z * sigmoid(of)
inline floats times_sigmoid(floats z, floats of) {
  floats one = splat(1), small = exponential(of < 0 ? of : -of);  // of -|of|, to avoid overflow
  return z * (of < 0 ? small : one) / (one + small);
}

inline floats silu(floats z) { return times_sigmoid(z, z); }

// gelu(z), in its approximation by tanh: (1 + tanh(x)) / 2 = sigmoid(2 x).
inline floats gelu(floats z) { return times_sigmoid(z, 1.595769122f * fma(z * z * z, splat(0.044715f), z)); }

}  // namespace
