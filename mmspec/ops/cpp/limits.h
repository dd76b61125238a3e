// Upper bounds for products: memory bandwidth, and multiply-adds with operands in registers.

#pragma once

#include "products.h"

extern "C" {

const char* instructions() { return INSTRUCTIONS; }

// XOR of (count) bytes, a multiple of 1 KiB, read at full bandwidth.
int64_t read_bytes(const uint8_t* from, int64_t count, int threads) {
  constexpr int vectors = 8;
  constexpr int64_t at_once = vectors * sizeof(bytes);
  std::atomic<int64_t> found{0};
  Team team(threads);
  parts_of(count / 1024, 64, [&](int64_t begin, int64_t end) {
    bytes parts[vectors] = {};
    for (const uint8_t* at = from + begin * 1024; at < from + end * 1024; at += at_once) {
      for (int64_t i = 0; i < at_once; i += 64) __builtin_prefetch(at + AHEAD + i);
      for (int i = 0; i < vectors; i++) parts[i] ^= load<bytes>(at + i * sizeof(bytes));
    }
    for (int i = 1; i < vectors; i++) parts[0] ^= parts[i];
    for (size_t i = 0; i < sizeof(bytes); i += 8) found ^= load<int64_t>((const uint8_t*)parts + i);
  });
  return found;
}

// Runs multiply-adds with the instruction for weights of this kind; returns their number.
int64_t multiply_add(int64_t kind, int64_t rounds, int threads) {
  constexpr int chains = 12;  // instructions in flight
  std::atomic<int64_t> done{0};
  auto run = [&](auto zero, int64_t products, auto step) {
    Team team(threads);
    parts_of(rounds, rounds / 64 + 1, [&](int64_t begin, int64_t end) {
      auto own = step;
      auto start = zero;
      decltype(zero) sums[chains];
#pragma GCC unroll 12
      for (int i = 0; i < chains; i++) start[0] = i, sums[i] = start;  // distinct, else the compiler merges them
      for (int64_t round = begin; round < end; round++)
#pragma GCC unroll 12
        for (int i = 0; i < chains; i++) sums[i] = own(sums[i]);
      auto all = sums[0];
#pragma GCC unroll 12
      for (int i = 1; i < chains; i++) all += sums[i];
      asm volatile("" : : "m"(all));
      done += chains * products * (end - begin);
    });
    return int64_t(done);
  };
  bytes codes = bytes{} + uint8_t(1);
  int8_t inputs[4] = {1, 1, 1, 1};
  if (kind == BFLOAT16) {
    Half ones[2] = {half(1), half(1)};
    return run(floats{}, 2 * LANES, [=](floats sum) { return dot(sum, ints{} + 0x3f803f80, ones); });
  }
#if defined(MMSPEC_AVX2)
  return run(codes, 4 * LANES, [=](bytes sum) {
    return reinterpret_cast<bytes>(_mm256_maddubs_epi16((__m256i)codes, (__m256i)sum));
  });
#endif
  return run(ints{}, 4 * LANES, [=](ints sum) { return dot<INT4>(sum, codes, inputs); });
}

}  // extern "C"
