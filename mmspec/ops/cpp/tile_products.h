// Products in AMX's tile registers: up to 16 rows of inputs by 16 output features. Those of bfloat16 ran on such a
// processor; those of int8 only in tests that replace the instructions by loops, and were never timed.

#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
#define MMSPEC_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux grants a process its tile registers on request.
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;

// A thread's tile registers: 0 to 3 are sums (rows, 16), 4 inputs (rows, ``depth`` bytes), 5 weights (depth / 4, 16 of
// 4 bytes each), as they lie in a block.
class Tiles {
 public:
  ~Tiles() {
    if (rows_) _tile_release();
  }

  void configure(int64_t rows, int64_t depth) {
    if (rows == rows_) return;
    rows_ = rows;
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 6; tile++)
      config[16 + 2 * tile] = uint8_t(tile == 4 ? depth : 64), config[48 + tile] = uint8_t(tile < 5 ? rows : depth / 4);
    asm volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
  }

 private:
  int64_t rows_ = 0;
};

// The intrinsics take numbers of registers as literals only. GCC's do not tell it that they read memory.
#define MMSPEC_ADD_TILE(sum, dot, inputs, width, weights) \
  _tile_loadd(4, inputs, width); \
  _tile_loadd(5, weights, 64); \
  dot(sum, 4, 5)

#define MMSPEC_MULTIPLY_TILE(sum, step) \
  _tile_zero(sum); \
  MMSPEC_ADD_TILE(sum, _tile_dpbsud, inputs + (step) * depth, width, codes + (step) * 16 * depth); \
  _tile_stored(sum, products + (step) * 16, 64)

// products (steps, 16 rows): of codes (steps, depth / 4, 16 output features, 4) with int8 inputs (rows, steps, depth),
// rows ``width`` apart.
inline void multiply_tiles(const int8_t* inputs, int64_t width, const uint8_t* codes, int64_t depth, int64_t steps,
                           ints* products) {
  asm volatile("" : : "r"(codes) : "memory");
  int64_t step = 0;
  for (; step + 4 <= steps; step += 4) {
    MMSPEC_MULTIPLY_TILE(0, step);
    MMSPEC_MULTIPLY_TILE(1, step + 1);
    MMSPEC_MULTIPLY_TILE(2, step + 2);
    MMSPEC_MULTIPLY_TILE(3, step + 3);
  }
  for (; step < steps; step++) {
    MMSPEC_MULTIPLY_TILE(0, step);
  }
}

#define MMSPEC_ADD_GROUP(sum, group) \
  for (int64_t i = 0; i < 1024; i += 64) __builtin_prefetch(weights + (group) * 1024 + 8192 + i); \
  MMSPEC_ADD_TILE(sum, _tile_dpbf16ps, inputs + (group) * 32, width * 2, weights + (group) * 1024)

// sums (rows) += products of bfloat16 weights (groups, 16, 16 output features, 2) with inputs (rows, width).
inline void add_bfloat16_tiles(const uint16_t* inputs, int64_t width, const uint8_t* weights, int64_t groups, int rows,
                               floats* sums) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  int64_t group = 0;
  for (; group + 4 <= groups; group += 4) {
    MMSPEC_ADD_GROUP(0, group);
    MMSPEC_ADD_GROUP(1, group + 1);
    MMSPEC_ADD_GROUP(2, group + 2);
    MMSPEC_ADD_GROUP(3, group + 3);
  }
  for (; group < groups; group++) {
    MMSPEC_ADD_GROUP(0, group);
  }
  floats parts[4][16];
  _tile_stored(0, parts[0], 64);
  _tile_stored(1, parts[1], 64);
  _tile_stored(2, parts[2], 64);
  _tile_stored(3, parts[3], 64);
  for (int row = 0; row < rows; row++)
    sums[row] += (parts[0][row] + parts[1][row]) + (parts[2][row] + parts[3][row]);
}

}  // namespace
#else
namespace {
struct Tiles {};
}  // namespace
#endif
