// Products of bfloat16 in AMX's tile registers: up to 16 rows of inputs by 16 output features.
//
// Integers take none: a group of 32 input features, after which sums are scaled, fills half a tile's depth, and storing
// its sums costs as much as multiplying it. On an Intel Xeon, products of int4 in tiles were 6 to 9 % faster than VNNI's
// with 16 rows, those of int8 not faster, and both slower with 12 or fewer.

#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
#define MMSPEC_AMX
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux grants a process its tile registers on request.
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;

// The intrinsics take numbers of registers as literals only. GCC's do not tell it that they read memory.
#define MMSPEC_ADD_GROUP(sum, group) \
  for (int64_t i = 0; i < 1024; i += 64) __builtin_prefetch(weights + (group) * 1024 + 8192 + i); \
  _tile_loadd(4, inputs + (group) * 512, 64); \
  _tile_loadd(5, weights + (group) * 1024, 64); \
  _tile_dpbf16ps(sum, 4, 5)

// A thread's tile registers: 0 to 3 are sums (rows, 16), 4 inputs (rows, 32), 5 weights (16, 16 output features, 2).
class Tiles {
 public:
  ~Tiles() {
    if (rows_) _tile_release();
  }

  // sums (rows) += products of weights (groups, 16, 16 output features, 2) with inputs (groups, 16 rows, 32).
  void add(const uint16_t* inputs, const uint8_t* weights, int64_t groups, int rows, floats* sums) {
    configure(rows);
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

 private:
  void configure(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 6; tile++) config[16 + 2 * tile] = 64, config[48 + tile] = uint8_t(tile < 5 ? rows : 16);
    asm volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
  }

  int rows_ = 0;
};

}  // namespace
#else
namespace {

constexpr bool has_tiles = false;

struct Tiles {
  template <class T>
  void add(const T*, const uint8_t*, int64_t, int, floats*) {}
};

}  // namespace
#endif
