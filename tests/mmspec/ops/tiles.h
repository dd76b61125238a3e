// AMX's tile instructions as plain loops, after the pseudo-code of LDTILECFG, TILELOADD, TILESTORED, TILEZERO and
// TDPBF16PS in Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2. What faults there aborts here.
// Included before the kernels, whose calls then come here.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace loops {

struct Tile {
  int rows, columns;  // bytes of a row
  uint8_t row[16][64];
};

thread_local Tile tiles[8];
thread_local bool configured;
std::atomic<int64_t> products;

inline void require(bool condition) {
  if (!condition) std::abort();
}

inline void release() {
  std::memset(tiles, 0, sizeof tiles);
  configured = false;
}

inline void load_config(const void* from) {
  const uint8_t* config = static_cast<const uint8_t*>(from);
  release();
  for (int i = 0; i < 16; i++) require(i == 0 ? config[i] == 1 : config[i] == 0);
  for (int i = 0; i < 16; i++) {
    int columns = config[16 + 2 * i] + 256 * config[17 + 2 * i], rows = config[48 + i];
    require(columns <= 64 && rows <= 16 && (columns == 0) == (rows == 0) && (i < 8 || rows == 0));
    if (i < 8) tiles[i].rows = rows, tiles[i].columns = columns;
  }
  configured = true;
}

inline Tile& used(int i) {
  require(configured && tiles[i].rows > 0);
  return tiles[i];
}

inline void zero(int i) { std::memset(used(i).row, 0, sizeof tiles[i].row); }

inline void load(int i, const void* from, int64_t stride) {
  zero(i);
  for (int m = 0; m < tiles[i].rows; m++)
    std::memcpy(tiles[i].row[m], static_cast<const uint8_t*>(from) + m * stride, tiles[i].columns);
}

inline void store(int i, void* to, int64_t stride) {
  for (int m = 0; m < used(i).rows; m++)
    std::memcpy(static_cast<uint8_t*>(to) + m * stride, tiles[i].row[m], tiles[i].columns);
}

inline float widened(const uint8_t* half) {
  uint32_t bits = uint32_t(half[0] + 256 * half[1]) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void multiply_bfloat16(int sum, int a, int b) {
  require(sum != a && sum != b && a != b);
  require(used(sum).rows == used(a).rows && used(sum).columns == used(b).columns);
  require(tiles[a].columns == 4 * tiles[b].rows && tiles[b].columns % 4 == 0);
  products++;
  for (int m = 0; m < tiles[sum].rows; m++)
    for (int n = 0; n < tiles[sum].columns / 4; n++) {
      float parts[2] = {}, value;
      for (int k = 0; k < tiles[a].columns / 4; k++)
        for (int i = 0; i < 2; i++)
          parts[i] = __builtin_fmaf(widened(tiles[a].row[m] + 4 * k + 2 * i), widened(tiles[b].row[k] + 4 * n + 2 * i),
                                    parts[i]);
      std::memcpy(&value, tiles[sum].row[m] + 4 * n, 4);
      value += parts[0] + parts[1];
      std::memcpy(tiles[sum].row[m] + 4 * n, &value, 4);
    }
}

}  // namespace loops

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig loops::load_config
#define _tile_release loops::release
#define _tile_loadd loops::load
#define _tile_stored loops::store
#define _tile_zero loops::zero
#define _tile_dpbf16ps loops::multiply_bfloat16
#define syscall(...) 0L  // grants the registers
