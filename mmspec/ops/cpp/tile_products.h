// bfloat16 products in AMX tile registers: up to 16 input rows by 16 output features. Not used for integers: a group of
// 32 input features, after which sums are scaled, fills half a tile, and storing sums costs as much as the product, so
// VNNI is as fast.

#pragma once

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && !defined(MMSPEC_PORTABLE)
#define MMSPEC_AMX
#include <sys/syscall.h>
#include <unistd.h>

#include <array>

namespace {

// Linux grants a process its tile registers on request.
const bool has_tiles = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;

// A thread's tile registers, with 64 bytes per row.
class Registers {
 public:
  ~Registers() {
    if (rows_ != Counts{}) _tile_release();
  }

 protected:
  using Counts = std::array<uint8_t, 8>;

  // Sets the number of rows of each register.
  void configure(const Counts& rows) {
    if (rows == rows_) return;
    rows_ = rows;
    alignas(64) uint8_t config[64] = {1};
    for (int tile = 0; tile < 8; tile++) config[16 + 2 * tile] = rows[tile] ? 64 : 0, config[48 + tile] = rows[tile];
    asm volatile("" : : "r"(config) : "memory");
    _tile_loadconfig(config);
  }

 private:
  Counts rows_{};
};

// Intrinsics only take literal register numbers. GCC's intrinsics do not declare that they read memory.
#define MMSPEC_ADD_GROUP(sum, group) \
  for (int64_t i = 0; i < 1024; i += 64) __builtin_prefetch(weights + (group) * 1024 + 8192 + i); \
  _tile_loadd(4, inputs + (group) * 32 * width, 64); \
  _tile_loadd(5, weights + (group) * 1024, 64); \
  _tile_dpbf16ps(sum, 4, 5)

// A thread's tile registers: 0 to 3 are sums (rows, 16), 4 inputs (rows, 32), 5 weights (16, 16 output features, 2).
class Tiles : Registers {
 public:
  // sums (rows) += products of weights (groups, 16, 16 output features, 2) with inputs (groups, width, 32).
  void add(const uint16_t* inputs, const uint8_t* weights, int64_t groups, int64_t width, int rows, floats* sums) {
    uint8_t count = uint8_t(rows);
    configure({count, count, count, count, count, 16, 0, 0});
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
};

}  // namespace
#else
namespace {

constexpr bool has_tiles = false;

struct Tiles {
  template <class T>
  void add(const T*, const uint8_t*, int64_t, int64_t, int, floats*) {}
};

}  // namespace
#endif
