// CPU kernels: products with quantised weights, tree attention, what a decoder layer does around them, the greatest
// logits, sampling, and a level of a draft tree.
//
// Every row of a result has the same bits for any number of rows and threads, and a node's attention for any layout of
// the slots that it attends to: a token in a tree gets exactly what it gets in plain decoding.
//
// Weights lie in blocks of 16 output features, which are read in order, from one address to the next: processors
// prefetch nothing else. A block is a sequence of groups of 32 input features:
//   int4      256 bytes of codes, 16 scales, 16 values of code 0 (float16): the layout of GGUF's Q4_1, transposed
//   int8      of two groups: 512 bytes of codes plus 128 each, 16 scales (float16) each: Q8_0
//   bfloat16  1024 bytes
//   float32   2048 bytes
// Within a group, 4 input features (bfloat16: 2, float32: 1) of all 16 output features are neighbours, the operand of a
// dot product instruction. Inputs of int4 and int8 are quantised to int8, per row and group.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
#define MMSPEC_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// LANES: floats of a vector register. TILE: rows of inputs that share a load of weights.
#if defined(__AVX512F__)
constexpr int64_t LANES = 16, TILE = 8;
#else
constexpr int64_t LANES = 8, TILE = 4;
#endif
constexpr int64_t BLOCK = 16, GROUP = 32, CHUNK = 128;
constexpr int64_t AHEAD = 16;  // groups to prefetch

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

inline void store(float* to, floats value) { std::memcpy(to, &value, sizeof value); }
inline floats splat(float value) { return value - floats{}; }
inline floats as_floats(ints value) { return reinterpret_cast<floats>(value); }

inline floats fma(floats a, floats b, floats c) {
#if defined(__AVX512F__)
  return reinterpret_cast<floats>(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
#elif defined(__FMA__)
  return reinterpret_cast<floats>(_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c));
#else
  for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

inline float sum(floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  value += __builtin_shufflevector(value, value, 4, 5, 6, 7, 4, 5, 6, 7);
  value += __builtin_shufflevector(value, value, 2, 3, 2, 3, 4, 5, 6, 7);
  return value[0] + value[1];
#endif
}

// The sums of LANES vectors. Each is summed in the same order, whatever the others are.
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
  floats n = x * 1.44269504f + 12582912.0f;  // rounded to an integer in the low bits
  ints power = reinterpret_cast<ints>(n) - 0x4b400000;
  n -= 12582912.0f;
  floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  floats p = splat(1.0f / 720);
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(factor));
  return as_floats(reinterpret_cast<ints>(p) + (power << 23));
}

enum Kind : int64_t { INT4, INT8, BFLOAT16, FLOAT32 };

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

inline ints lanes() {
  ints value;
  for (int i = 0; i < LANES; i++) value[i] = i;
  return value;
}

}  // namespace

extern "C" {

struct Linear {
  const uint8_t* blocks;
  const float* bias;  // may be null
  int64_t kind, in, out;
};

struct Layer {
  Linear qkv, read, gate_up, down;
  const float *attention_norm, *mlp_norm;
  float attention_epsilon, mlp_epsilon;
  int64_t heads, kv_heads, head_dim;
};

struct Attention {
  const float *query, *key, *value;
  const uint8_t* mask;  // null: causal, the last slots are those of the nodes
  float* read;
  float scale;
  int64_t batch, nodes, slots, heads, kv_heads, head_dim;
  int64_t query_row, query_node;  // strides in elements; heads of a query are neighbours
  int64_t key_row, key_head, key_slot;
  int64_t mask_row, mask_node;
};

// A pass through all layers of a decoder. Its keys and values are written to the slots from ``start`` on of a cache
// (layers, 2, rows, kv_heads, slots, head_dim), of which ``attention`` describes one layer.
struct Pass {
  const Layer* layers;
  int64_t count, hidden, start;
  const float *x, *rotation;
  float* states;  // (layers, batch * nodes, hidden): each layer's output
  float* cache;
  int64_t cache_part;  // stride between the keys and the values of a layer
  Attention attention;
};

// A recurrent cell that drafts: its layers over a carried state, what it reads of each token, and its LayerNorm.
struct Cell {
  Linear into, out, guess, head;  // the head takes the guess, which is of the carried state
  const float *table, *norm, *norm_bias;  // (tokens, into.out): the product with the token's embedding, and the bias
  float epsilon;
};

}  // extern "C"

namespace {

inline int64_t groups_of(int64_t features) { return (features + GROUP - 1) / GROUP; }

// Rows of inputs in the form that a kind of weights takes, padded to whole groups.
struct Rows {
  int64_t width, groups;
  std::vector<int8_t> codes;
  std::vector<Half> rounded;
  std::vector<float> exact, scale, total_scaled;
  std::vector<int32_t> total;

  // Makes room for CHUNK rows.
  void shape(int64_t features) {
    groups = groups_of(features), width = groups * GROUP;
    if (codes.size() < size_t(CHUNK * width)) {
      codes.resize(CHUNK * width), rounded.resize(CHUNK * width), exact.resize(CHUNK * width);
      scale.resize(CHUNK * groups), total_scaled.resize(CHUNK * groups), total.resize(CHUNK * groups);
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
    for (int i = 0; i < GROUP; i++) sum += code[i];
    scale[at] = step, total[at] = sum, total_scaled[at] = step * float(sum);
  }
};

// Codes and scales of a group; groups whose scales share a cache line, so that no load crosses one.
constexpr int64_t code_bytes[] = {256, 512, 1024, 2048}, scale_bytes[] = {64, 32, 0, 0}, together[] = {1, 2, 1, 1};

constexpr int64_t block_bytes(Kind kind, int64_t groups) {
  return (groups + together[kind] - 1) / together[kind] * together[kind] * (code_bytes[kind] + scale_bytes[kind]);
}

// Adds the products of one group of LANES output features and the same group of several rows, for which weights are
// loaded once.
template <Kind kind, int tile>
inline void add_group(const uint8_t* from, const uint8_t* scales, const Rows& x, int64_t first, int64_t group,
                      floats* sums) {
  // Where there is little to compute, the processor's own prefetching keeps up. Into the second level cache: the first
  // one's lines are taken by loads.
  if constexpr (kind != FLOAT32 && tile >= 4) {
    constexpr int64_t ahead = block_bytes(kind, AHEAD);
    for (int64_t i = 0; i < code_bytes[kind]; i += 64) __builtin_prefetch(from + ahead + i, 0, 2);
    if constexpr (scale_bytes[kind] > 0) __builtin_prefetch(scales + ahead, 0, 2);
  }
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
#pragma GCC unroll 8
    for (int row = 0; row < tile; row++) {
      int64_t at = (first + row) * x.groups + group;
      ints sum = dot<kind>(codes, x.codes.data() + (first + row) * x.width + group * GROUP, x.total[at]);
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
  for (int64_t block = 0; block < (layer.out + BLOCK - 1) / BLOCK; block++)
    for (int64_t column = block * BLOCK; column < std::min(block * BLOCK + BLOCK, layer.out); column += LANES) {
      int64_t columns = std::min(LANES, layer.out - column);
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
  for (int64_t block = 0; block < (layer.out + BLOCK - 1) / BLOCK; block++)
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
      int64_t columns = std::min(BLOCK, layer.out - block * BLOCK);
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

void product(const Linear& layer, const Rows& x, int64_t rows, float* out, const float* residual = nullptr) {
#if defined(MMSPEC_AMX)
  if (layer.kind == BFLOAT16 && has_tiles) return product_by_tiles(layer, x, rows, out, residual);
#endif
  if (layer.kind == INT4) return product_of<INT4>(layer, x, rows, out, residual);
  if (layer.kind == INT8) return product_of<INT8>(layer, x, rows, out, residual);
  if (layer.kind == FLOAT32) return product_of<FLOAT32>(layer, x, rows, out, residual);
  product_of<BFLOAT16>(layer, x, rows, out, residual);
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

// RMSNorm(rows) as the inputs of a layer; ``in`` is a multiple of 32.
void take_normed(const Linear& layer, Rows& x, const float* from, int64_t rows, const float* weight, float epsilon) {
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; row++) {
    const float* input = from + row * layer.in;
    floats low{}, high{};
    for (int64_t i = 0; i < layer.in; i += 2 * LANES) {
      floats a = load<floats>(input + i), b = load<floats>(input + i + LANES);
      low = fma(a, a, low), high = fma(b, b, high);
    }
    floats factor = splat(1 / std::sqrt(sum(low + high) / float(layer.in) + epsilon));
    float normed[GROUP];
    for (int64_t group = 0; group < x.groups; group++) {
      for (int64_t i = 0; i < GROUP; i += LANES) {
        int64_t at = group * GROUP + i;
        store(normed + i, load<floats>(input + at) * factor * load<floats>(weight + at));
      }
      x.set(Kind(layer.kind), row, group, normed);
    }
  }
}

// silu(z)
inline floats silu(floats z) {
  floats one = splat(1), small = exponential(z < 0 ? z : -z);  // of -|z|, so that it cannot overflow
  return z * (z < 0 ? small : one) / (one + small);
}

// silu(gate) * up as the inputs of a layer; ``in`` is a multiple of 32.
void take_gated(const Linear& layer, Rows& x, const float* gate_up, int64_t rows) {
#pragma omp for schedule(static) collapse(2)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t group = 0; group < x.groups; group++) {
      const float* gate = gate_up + 2 * row * layer.in + group * GROUP;
      float gated[GROUP];
      for (int64_t i = 0; i < GROUP; i += LANES) {
        store(gated + i, silu(load<floats>(gate + i)) * load<floats>(gate + layer.in + i));
      }
      x.set(Kind(layer.kind), row, group, gated);
    }
}

// LayerNorm of a row; ``features`` is a multiple of LANES.
void centre(float* row, int64_t features, const float* weight, const float* bias, float epsilon) {
  floats total{}, square{};
  for (int64_t i = 0; i < features; i += LANES) total += load<floats>(row + i);
  floats mean = splat(sum(total) / float(features));
  for (int64_t i = 0; i < features; i += LANES) {
    floats x = load<floats>(row + i) - mean;
    square = fma(x, x, square);
  }
  floats factor = splat(1 / std::sqrt(sum(square) / float(features) + epsilon));
  for (int64_t i = 0; i < features; i += LANES)
    store(row + i, fma((load<floats>(row + i) - mean) * factor, load<floats>(weight + i), load<floats>(bias + i)));
}

// The scores of LANES slots.
template <int parts, class Slot>
inline floats scores_of(const float* query, const float* keys, int64_t stride, Slot slot) {
  floats products[LANES];
#pragma GCC unroll 16
  for (int64_t lane = 0; lane < LANES; lane++) {
    const float* key = keys + slot(lane) * stride;
    products[lane] = load<floats>(query) * load<floats>(key);
    for (int i = 1; i < parts; i++)
      products[lane] = fma(load<floats>(query + LANES * i), load<floats>(key + LANES * i), products[lane]);
  }
  return sums(products);
}

// read += the values of some slots, each times its share, in order.
template <int parts, class Slot>
inline void add_values(float* read, const float* shares, int64_t count, const float* values, int64_t stride,
                       Slot slot) {
  floats sum[parts];
  for (int i = 0; i < parts; i++) sum[i] = load<floats>(read + LANES * i);
  for (int64_t j = 0; j < count; j++) {
    const float* value = values + slot(j) * stride;
    for (int i = 0; i < parts; i++) sum[i] = fma(splat(shares[j]), load<floats>(value + LANES * i), sum[i]);
  }
  for (int i = 0; i < parts; i++) store(read + LANES * i, sum[i]);
}

// Scores to softmax weights, in whole vectors; what is beyond ``count`` becomes 0. Returns the inverse of their sum.
inline float exponentials(float* scores, int64_t count) {
  floats most = splat(-INFINITY), total{};
  for (int64_t j = 0; j < count; j += LANES) {
    floats x = load<floats>(scores + j);
    x = lanes() < int32_t(count - j) ? x : splat(-INFINITY);
    store(scores + j, x);
    most = x > most ? x : most;
  }
  floats top = splat(greatest(most));
  for (int64_t j = 0; j < count; j += LANES) {
    floats x = load<floats>(scores + j), share = exponential(x - top);
    share = x == -INFINITY ? floats{} : share;
    store(scores + j, share);
    total += share;
  }
  float whole = sum(total);
  return whole > 0 ? 1 / whole : 0;  // a node without slots, such as padding, reads 0
}

struct AttentionScratch {
  std::vector<int32_t> slots;
  std::vector<float> scores, inverse;
};

// Attention of up to NODES nodes' heads that share a key head. Slots that all these nodes attend to are read once, in
// tiles of LANES; then come the others of each node. So the sums of a node run over its slots in order.
constexpr int64_t NODES = 4;

template <int parts>
void attend(const Attention& a, int64_t row, int64_t kv, int64_t first, AttentionScratch& scratch) {
  int64_t group = a.heads / a.kv_heads, nodes = std::min(NODES, a.nodes - first), queries = nodes * group;
  const uint8_t* mask = a.mask ? a.mask + row * a.mask_row + first * a.mask_node : nullptr;
  int64_t shared = mask ? a.slots : a.slots - a.nodes + first + 1;
  for (int64_t node = 0; mask && node < nodes; node++) {
    const void* hole = std::memchr(mask + node * a.mask_node, 0, shared);
    if (hole) shared = static_cast<const uint8_t*>(hole) - (mask + node * a.mask_node);
  }
  shared -= shared % LANES;
  int64_t width = (a.slots + 2 * LANES) / LANES * LANES, rest[NODES];
  if (scratch.scores.size() < size_t(queries * width)) scratch.scores.resize(queries * width);
  if (scratch.slots.size() < size_t(nodes * width)) scratch.slots.resize(nodes * width);
  for (int64_t node = 0; node < nodes; node++) {
    int32_t* slots = scratch.slots.data() + node * width;
    int64_t count = 0, end = mask ? a.slots : a.slots - a.nodes + first + node + 1;
    for (int64_t slot = shared; slot < end; slot++) {
      slots[count] = int32_t(slot);
      count += mask ? mask[node * a.mask_node + slot] : 1;
    }
    std::fill_n(slots + count, LANES, 0);  // whole vectors are read
    rest[node] = count;
  }
  const float* keys = a.key + row * a.key_row + kv * a.key_head;
  const float* values = a.value + row * a.key_row + kv * a.key_head;
  auto node_of = [&](int64_t query) { return query / group; };
  auto head_of = [&](int64_t query) { return kv * group + query % group; };
  auto query_of = [&](int64_t query) {
    return a.query + row * a.query_row + (first + node_of(query)) * a.query_node + head_of(query) * a.head_dim;
  };
  auto read_of = [&](int64_t query) {
    return a.read + ((row * a.nodes + first + node_of(query)) * a.heads + head_of(query)) * a.head_dim;
  };
  auto scores = [&](int64_t query) { return scratch.scores.data() + query * width; };
  floats scale = splat(a.scale);
  for (int64_t j = 0; j < shared; j += LANES)
    for (int64_t query = 0; query < queries; query++) {
      auto slot = [j](int64_t lane) { return j + lane; };
      store(scores(query) + j, scores_of<parts>(query_of(query), keys, a.key_slot, slot) * scale);
    }
  scratch.inverse.resize(queries);
  for (int64_t query = 0; query < queries; query++) {
    const int32_t* slots = scratch.slots.data() + node_of(query) * width;
    for (int64_t j = 0; j < rest[node_of(query)]; j += LANES) {
      auto slot = [slots, j](int64_t lane) { return int64_t(slots[j + lane]); };
      store(scores(query) + shared + j, scores_of<parts>(query_of(query), keys, a.key_slot, slot) * scale);
    }
    scratch.inverse[query] = exponentials(scores(query), shared + rest[node_of(query)]);
    std::fill_n(read_of(query), a.head_dim, 0.0f);
  }
  for (int64_t j = 0; j < shared; j += LANES)
    for (int64_t query = 0; query < queries; query++)
      add_values<parts>(read_of(query), scores(query) + j, LANES, values, a.key_slot,
                        [j](int64_t lane) { return j + lane; });
  for (int64_t query = 0; query < queries; query++) {
    const int32_t* slots = scratch.slots.data() + node_of(query) * width;
    float* read = read_of(query);
    add_values<parts>(read, scores(query) + shared, rest[node_of(query)], values, a.key_slot,
                      [slots](int64_t j) { return int64_t(slots[j]); });
    for (int i = 0; i < parts; i++) store(read + LANES * i, load<floats>(read + LANES * i) * scratch.inverse[query]);
  }
}

template <int parts>
void attend_all(const Attention& a, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    AttentionScratch scratch;
#pragma omp for schedule(dynamic) collapse(3)
    for (int64_t row = 0; row < a.batch; row++)
      for (int64_t first = 0; first < a.nodes; first += NODES)
        for (int64_t kv = 0; kv < a.kv_heads; kv++) attend<parts>(a, row, kv, first, scratch);
  }
}

// The k greatest of a row and their places, in descending order, equal ones by place.
void greatest_of(const float* row, int64_t count, int64_t k, float* best, int64_t* places) {
  int64_t found = 0;
  floats least = splat(-INFINITY);
  auto visit = [&](floats values, int64_t first) {
    for (uint32_t left = greater(values, least); left; left &= left - 1) {
      int lane = __builtin_ctz(left);
      if (found == k && !(values[lane] > best[k - 1])) continue;
      int64_t place = found < k ? found++ : k - 1;
      for (; place && best[place - 1] < values[lane]; place--)
        best[place] = best[place - 1], places[place] = places[place - 1];
      best[place] = values[lane], places[place] = first + lane;
      if (found == k) least = splat(best[k - 1]);
    }
  };
  int64_t whole = count - count % LANES, at = 0;
  for (; at + 4 * LANES <= whole; at += 4 * LANES) {  // few of these have a value to insert
    floats a = load<floats>(row + at), b = load<floats>(row + at + LANES);
    floats c = load<floats>(row + at + 2 * LANES), d = load<floats>(row + at + 3 * LANES);
    floats ab = a > b ? a : b, cd = c > d ? c : d;
    if (greater(ab > cd ? ab : cd, least))
      visit(a, at), visit(b, at + LANES), visit(c, at + 2 * LANES), visit(d, at + 3 * LANES);
  }
  for (; at < whole; at += LANES) visit(load<floats>(row + at), at);
  floats rest = splat(-INFINITY);
  for (; at < count; at++) rest[at - whole] = row[at];
  visit(rest, whole);
  for (at = 0; at < count && found < k; at++)
    if (!(row[at] > -INFINITY)) best[found] = -INFINITY, places[found++] = at;
}

// exp(x - top) of LANES values from ``at`` on, 0 after the last one and where it is below the least float.
inline floats shares_at(const float* row, int64_t at, int64_t count, floats top) {
  floats values = splat(-INFINITY);
  if (count - at < LANES) {
    for (int64_t i = at; i < count; i++) values[i - at] = row[i];
  } else {
    values = load<floats>(row + at);
  }
  values -= top;
  return values < -87.0f ? floats{} : exponential(values);
}

// sum(exp(row - most))
inline float total_of(const float* row, int64_t count, float most) {
  floats total[4] = {}, top = splat(most);
  for (int64_t at = 0; at < count; at += LANES) total[at / LANES % 4] += shares_at(row, at, count, top);
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// The token at which the cumulative distribution softmax(row) exceeds ``uniform``; the last possible one otherwise.
int64_t quantile_of(const float* row, int64_t count, double uniform) {
  constexpr int64_t STRETCH = 64 * LANES;
  int64_t top_at = 0, last = 0;
  float most;
  greatest_of(row, count, 1, &most, &top_at);
  std::vector<float> totals;
  double total = 0, before = 0;
  for (int64_t at = 0; at < count; at += STRETCH) {
    totals.push_back(total_of(row + at, std::min(STRETCH, count - at), most));
    total += totals.back();
  }
  double wanted = uniform * total;
  for (size_t i = 0; i < totals.size(); i++) {
    if (before + totals[i] <= wanted && i + 1 < totals.size()) {
      before += totals[i];
      continue;
    }
    for (int64_t first = i * STRETCH, at = first; at < count; at += LANES) {
      floats shares = shares_at(row, at, count, splat(most));
      for (int lane = 0; lane < LANES; lane++) {
        if (!(shares[lane] > 0)) continue;
        before += shares[lane], last = at + lane;
        if (before > wanted) return last;
      }
    }
  }
  return last;
}

thread_local Rows inputs, hidden;
thread_local std::vector<float> gates;

}  // namespace

extern "C" {

// out (rows, out) = x (rows, in) W^T + bias
void linear(const Linear* layer, const float* x, int64_t rows, float* out, int threads) {
  Rows& operand = inputs;
  operand.shape(layer->in);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first);
    take(*layer, operand, x + first * layer->in, count);
    product(*layer, operand, count, out + first * layer->out);
  }
}

// Queries and keys, rotated, and values: qkv (rows, heads + 2 kv_heads, head_dim) of x (rows, hidden).
// rotation: (rows, head_dim / 2, 2), cosine and sine for each pair of neighbouring features.
void attention_inputs(const Layer* layer, const float* x, const float* rotation, int64_t rows, float* qkv,
                      int threads) {
  const Linear& linear = layer->qkv;
  int64_t head_dim = layer->head_dim, turned = layer->heads + layer->kv_heads;
  Rows& operand = inputs;
  operand.shape(linear.in);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first);
    float* out = qkv + first * linear.out;
    take_normed(linear, operand, x + first * linear.in, count, layer->attention_norm, layer->attention_epsilon);
    product(linear, operand, count, out);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; row++) {
      const float* turn = rotation + (first + row) * head_dim;
      for (int64_t head = 0; head < turned; head++) {
        float* pair = out + row * linear.out + head * head_dim;
        for (int64_t i = 0; i < head_dim; i += 2) {
          float a = pair[i], b = pair[i + 1], cosine = turn[i], sine = turn[i + 1];
          pair[i] = a * cosine - b * sine, pair[i + 1] = a * sine + b * cosine;
        }
      }
    }
  }
}

// Softmax attention of nodes to the slots that the mask allows them; 1 if head_dim is not supported.
int attention(const Attention* a, int threads) {
  switch (a->head_dim) {
    case 16: return attend_all<16 / LANES>(*a, threads), 0;
    case 32: return attend_all<32 / LANES>(*a, threads), 0;
    case 48: return attend_all<48 / LANES>(*a, threads), 0;
    case 64: return attend_all<64 / LANES>(*a, threads), 0;
    case 80: return attend_all<80 / LANES>(*a, threads), 0;
    case 96: return attend_all<96 / LANES>(*a, threads), 0;
    case 112: return attend_all<112 / LANES>(*a, threads), 0;
    case 128: return attend_all<128 / LANES>(*a, threads), 0;
    case 256: return attend_all<256 / LANES>(*a, threads), 0;
    default: return 1;
  }
}

// The rest of a layer: out (rows, hidden) of what attention read (rows, heads * head_dim) and the residual x.
void layer_outputs(const Layer* layer, const float* read, const float* x, int64_t rows, float* out, int threads) {
  const Linear &first_linear = layer->read, &gate_up = layer->gate_up, &down = layer->down;
  Rows &operand = inputs, &gated = hidden;
  std::vector<float>& between = gates;
  operand.shape(std::max(first_linear.in, gate_up.in));
  gated.shape(down.in);
  if (between.size() < size_t(CHUNK * gate_up.out)) between.resize(CHUNK * gate_up.out);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first), at = first * first_linear.out;
#pragma omp single
    operand.shape(first_linear.in);
    take(first_linear, operand, read + first * first_linear.in, count);
    product(first_linear, operand, count, out + at, x + at);
#pragma omp single
    operand.shape(gate_up.in);
    take_normed(gate_up, operand, out + at, count, layer->mlp_norm, layer->mlp_epsilon);
    product(gate_up, operand, count, between.data());
    take_gated(down, gated, between.data(), count);
    product(down, gated, count, out + at, out + at);
  }
}

// The k <= count greatest of each row: values (rows, k), of log_softmax if asked, and their places.
void greatest_of_rows(const float* x, int64_t rows, int64_t count, int64_t k, int log_softmax, float* best,
                      int64_t* places, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; row++) {
    greatest_of(x + row * count, count, k, best + row * k, places + row * k);
    if (!log_softmax) continue;
    float most = best[row * k], total = most + std::log(total_of(x + row * count, count, most));
    for (int64_t i = 0; i < k; i++) best[row * k + i] -= total;
  }
}

// The token of each row at which the cumulative distribution softmax(row) exceeds uniform[row].
void quantiles_of_rows(const float* x, int64_t rows, int64_t count, const float* uniform, int64_t* tokens,
                       int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1)
  for (int64_t row = 0; row < rows; row++) tokens[row] = quantile_of(x + row * count, count, uniform[row]);
}

// A level of a draft tree: the cell takes the tokens of a beam and the states that they were drafted from, and returns
// their children, the k best tokens with their log probabilities, (rows, k) each.
// before: (batch, wide, hidden); rows = batch * beam; origin: (rows), each row's state among its batch row's;
// carried: (rows, hidden), the new states; guesses: (rows, guess.out).
void draft_level(const Cell* cell, const float* before, int64_t wide, const int64_t* origin, const int64_t* tokens,
                 int64_t rows, int64_t beam, int64_t k, float* carried, float* guesses, float* best,
                 int64_t* children, int threads) {
  const Linear &into = cell->into, &out = cell->out, &guess = cell->guess, &head = cell->head;
  int64_t width = out.out;
  Rows &operand = inputs, &gated = hidden;
  std::vector<float>& between = gates;
  int64_t widest = std::max(into.out, head.out);
  if (between.size() < size_t(CHUNK * widest)) between.resize(CHUNK * widest);
  operand.shape(std::max(width, head.in));
  gated.shape(into.out);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first);
    float *state = carried + first * width, *read = between.data();
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; row++) {
      int64_t from = (first + row) / beam * wide + origin[first + row];
      std::memcpy(state + row * width, before + from * width, width * sizeof(float));
      std::memcpy(read + row * into.out, cell->table + tokens[first + row] * into.out, into.out * sizeof(float));
    }
#pragma omp single
    operand.shape(width);
    take(into, operand, state, count);
    product(into, operand, count, read, read);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; row++)
      for (int64_t i = row * into.out; i < (row + 1) * into.out; i += LANES)
        store(read + i, silu(load<floats>(read + i)));
    take(out, gated, read, count);
    product(out, gated, count, state, state);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; row++)
      centre(state + row * width, width, cell->norm, cell->norm_bias, cell->epsilon);
    take(guess, operand, state, count);
    product(guess, operand, count, guesses + first * guess.out);
#pragma omp single
    operand.shape(head.in);
    take(head, operand, guesses + first * guess.out, count);
    product(head, operand, count, read);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < count; row++) {
      const float* logits = read + row * head.out;
      float* top = best + (first + row) * k;
      greatest_of(logits, head.out, k, top, children + (first + row) * k);
      float total = top[0] + std::log(total_of(logits, head.out, top[0]));
      for (int64_t i = 0; i < k; i++) top[i] -= total;
    }
  }
}

void decode(const Pass* pass, int threads) {
  Attention a = pass->attention;
  int64_t rows = a.batch * a.nodes, width = (a.heads + 2 * a.kv_heads) * a.head_dim, kv_width = a.kv_heads * a.head_dim;
  std::vector<float> qkv(rows * width), read(rows * a.heads * a.head_dim);
  a.query = qkv.data(), a.read = read.data(), a.query_row = a.nodes * width, a.query_node = width;
  const float* x = pass->x;
  for (int64_t index = 0; index < pass->count; index++) {
    const Layer* layer = pass->layers + index;
    attention_inputs(layer, x, pass->rotation, rows, qkv.data(), threads);
    float* parts[] = {pass->cache + 2 * index * pass->cache_part, pass->cache + (2 * index + 1) * pass->cache_part};
    a.key = parts[0], a.value = parts[1];
    for (int64_t row = 0; row < rows; row++)
      for (int part = 0; part < 2; part++) {
        const float* from = qkv.data() + row * width + a.heads * a.head_dim + part * kv_width;
        float* to = parts[part] + row / a.nodes * a.key_row + (pass->start + row % a.nodes) * a.key_slot;
        for (int64_t head = 0; head < a.kv_heads; head++)
          std::memcpy(to + head * a.key_head, from + head * a.head_dim, a.head_dim * sizeof(float));
      }
    attention(&a, threads);
    float* out = pass->states + index * rows * pass->hidden;
    layer_outputs(layer, read.data(), x, rows, out, threads);
    x = out;
  }
}

}  // extern "C"
