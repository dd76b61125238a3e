// Products of int8 by AArch64's matrix instruction (i8mm): two rows of inputs by two output features, 8 input features
// at a time. Integer sums are exact, so results equal those of dot product instructions. Not benchmarked.

#pragma once

#include "vectors.h"

#if defined(__aarch64__) && defined(__linux__) && !defined(MMSPEC_PORTABLE)
#define MMSPEC_I8MM
#include <sys/auxv.h>

namespace {

const bool has_i8mm = getauxval(AT_HWCAP2) & (1 << 13);  // HWCAP2_I8MM

// Products of a group's codes, 4 input features per lane in a vector, with the inputs of several rows, ``width`` apart.
// Flipping the bits ``flipped`` converts codes to int8.
__attribute__((target("arch=armv8.2-a+i8mm"))) inline void dot_pairs(const bytes (&codes)[8], uint8_t flipped,
                                                                     const int8_t* inputs, int64_t width, int rows,
                                                                     ints* sums) {
  int8x16_t weights[4][4];  // 8 input features of two lanes
  for (int i = 0; i < 8; i++) {
    bytes both[2] = {codes[i / 2 * 2] ^ flipped, codes[i / 2 * 2 + 1] ^ flipped};
    int32x4_t even = load<int32x4_t>((const char*)&both[0] + i % 2 * 16);
    int32x4_t odd = load<int32x4_t>((const char*)&both[1] + i % 2 * 16);
    weights[i / 2][i % 2 * 2] = vreinterpretq_s8_s32(vzip1q_s32(even, odd));
    weights[i / 2][i % 2 * 2 + 1] = vreinterpretq_s8_s32(vzip2q_s32(even, odd));
  }
  for (int row = 0; row < rows; row += 2) {
    const int8_t *one = inputs + row * width, *other = row + 1 < rows ? one + width : one;
    int32x4_t products[4] = {};  // two lanes with the first row, then with the second
    for (int i = 0; i < 4; i++)
      for (int pair = 0; pair < 4; pair++)
        products[pair] = vmmlaq_s32(products[pair], vcombine_s8(vld1_s8(one + 8 * i), vld1_s8(other + 8 * i)),
                                    weights[i][pair]);
    int64x2_t of_rows[2][2];
    for (int half = 0; half < 2; half++) {
      int64x2_t low = vreinterpretq_s64_s32(products[2 * half]), high = vreinterpretq_s64_s32(products[2 * half + 1]);
      of_rows[0][half] = vzip1q_s64(low, high), of_rows[1][half] = vzip2q_s64(low, high);
    }
    for (int i = 0; i < 2 && row + i < rows; i++) sums[row + i] = load<ints>(of_rows[i]);
  }
}

}  // namespace
#endif
