// Layer inputs in the form required by the kind of weights, and norms before them.

#pragma once

#include "dots.h"
#include "pool.h"

namespace {

constexpr int64_t MOST_ROWS = 16;  // rows per tile register
constexpr int64_t CHUNK = 128;     // rows per pass over the weights

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

// Input rows in the form required by a kind of weights, padded to whole groups: (rows / 16, groups, 16 rows or all), so
// that a tile reads contiguous memory.
struct Rows {
  int64_t groups, width;  // contiguous rows
  Lines<int8_t> codes;
  Lines<Half> rounded;
  Lines<float> exact, scale, total_scaled;
  Lines<int32_t> int8_start, mxfp4_start, q6_start, q6_last_start;  // initial sums for codes of these kinds
  Lines<float> squares;                                             // (rows, groups) of inputs that are normed
  Lines<float> factor;                                              // of each row's products

  // Allocates for ``rows`` rows, or for CHUNK.
  void shape(int64_t features, int64_t rows) {
    groups = groups_of(features), width = std::min(rows, MOST_ROWS);
    int64_t all = std::max(CHUNK, (rows + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS) * groups;
    codes.reserve(all * GROUP), rounded.reserve(all * GROUP), exact.reserve(all * GROUP);
    scale.reserve(all), total_scaled.reserve(all), squares.reserve(all), factor.reserve(all);
    int8_start.reserve(all), mxfp4_start.reserve(all), q6_start.reserve(all), q6_last_start.reserve(all);
    std::fill_n(&factor[0], rows, 1.0f);
  }

  // Index of a group of a row; within 16 rows, the same group of the next row follows.
  int64_t at(int64_t row, int64_t group) const {
    return (row / MOST_ROWS * groups + group) * width + row % MOST_ROWS;
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
    mxfp4_start[index] = START - MXFP4_CENTRE * total;
    q6_start[index] = START - 32 * sums[0], q6_last_start[index] = START - 32 * sums[1];
    scale[index] = step, total_scaled[index] = step * float(total);
  }

  // Stores 32 features of a row that is normed: times the norm's ``weight``. Its factor is a factor of the products.
  void set_normed(Kind kind, int64_t row, int64_t group, const float* x, const float* weight) {
    float weighted[GROUP];
    floats square{};
    for (int64_t i = 0; i < GROUP; i += LANES) {
      floats part = load<floats>(x + i);
      square = fma(part, part, square);
      store(weighted + i, part * load<floats>(weight + i));
    }
    squares[row * groups + group] = sum(square);
    set(kind, row, group, weighted);
  }

  // Computes the factors of RMSNorm, once all features of ``rows`` rows are set.
  void norm(int64_t rows, float epsilon) {
    for (int64_t row = 0; row < rows; row++) {
      float total = 0;
      for (int64_t group = 0; group < groups; group++) total += squares[row * groups + group];
      factor[row] = 1 / std::sqrt(total / float(groups * GROUP) + epsilon);
    }
  }
};

// Converts rows to inputs of a layer.
void take(const Linear& layer, Rows& x, const float* from, int64_t rows) {
  x.shape(layer.in, rows);
  each(rows * x.groups, GROUP, [&](int64_t i) {
    int64_t row = i / x.groups, group = i % x.groups, left = layer.in - group * GROUP;
    const float* part = from + row * layer.in + group * GROUP;
    float padded[GROUP] = {};
    if (left < GROUP) std::memcpy(padded, part, left * sizeof(float));
    x.set(Kind(layer.kind), row, group, left < GROUP ? padded : part);
  });
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

// Converts RMSNorm(rows) to inputs of a layer, of a multiple of 32 features.
void take_normed(const Linear& layer, Rows& x, const float* from, int64_t rows, const float* weight, float epsilon) {
  x.shape(layer.in, rows);
  each(rows * x.groups, GROUP, [&](int64_t i) {
    int64_t row = i / x.groups, group = i % x.groups;
    x.set_normed(Kind(layer.kind), row, group, from + i * GROUP, weight + group * GROUP);
  });
  x.norm(rows, epsilon);
}

enum Activation : int64_t { SILU, GELU, SQUARED_RELU };  // the last has no gate

// act(scale * gate) * up; or with a limit, that of gpt-oss: gate * sigmoid(alpha gate) * (up + 1).
struct Gating {
  int64_t activation;
  float alpha = 0, limit = 0, scale = 1;

  floats operator()(floats gate, floats up) const {
    if (activation == SQUARED_RELU) {
      up = up > 0 ? up : floats{};
      return up * up;
    }
    gate *= scale;
    if (limit == 0) return (activation == GELU ? gelu(gate) : silu(gate)) * up;
    floats most = splat(limit);
    gate = gate < most ? gate : most, up = up < most ? up : most, up = up > -most ? up : -most;
    return times_sigmoid(gate, splat(alpha) * gate) * (up + 1);
  }
};

// Converts gated features to inputs of a layer; rows are ``stride`` apart, ``in`` a multiple of 32.
void take_gated(const Linear& layer, Rows& x, const float* gate_up, int64_t stride, int64_t rows, Gating gating) {
  x.shape(layer.in, rows);
  each(rows * x.groups, 4 * GROUP, [&](int64_t at) {
    int64_t row = at / x.groups, group = at % x.groups;
    const float* gate = gate_up + row * stride + group * GROUP;
    float gated[GROUP];
    for (int64_t i = 0; i < GROUP; i += LANES)
      store(gated + i, gating(load<floats>(gate + i), load<floats>(gate + layer.in + i)));
    x.set(Kind(layer.kind), row, group, gated);
  });
}

}  // namespace
