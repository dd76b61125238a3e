// Attention products in AMX tile registers: 16 queries by 16 slots or features at a time.

#pragma once

#include "pairs.h"
#include "tile_products.h"

#if defined(MMSPEC_AMX)
namespace {

// sums (queries of a tile, vectors) += the products of pairs of ``left`` (pairs, vectors) and ``right`` (queries, pairs).
#define MMSPEC_ADD_QUERIES(low, high, queries_of) \
  for (int64_t i = 0; i < vectors; i += 2) { \
    _tile_loadd(low, sums + query * stride + i * 16, stride * 4); \
    _tile_loadd(high, sums + query * stride + i * 16 + 16, stride * 4); \
    for (int64_t pair = 0; pair < pairs; pair += 16) { \
      _tile_loadd(queries_of, right + query * right_stride + 2 * pair, right_stride * 2); \
      _tile_loadd(6, left + pair * vectors + i, vectors * 64); \
      _tile_loadd(7, left + pair * vectors + i + 1, vectors * 64); \
      _tile_dpbf16ps(low, queries_of, 6); \
      _tile_dpbf16ps(high, queries_of, 7); \
    } \
    _tile_stored(low, sums + query * stride + i * 16, stride * 4); \
    _tile_stored(high, sums + query * stride + i * 16 + 16, stride * 4); \
  }

// A thread's tile registers: 0 and 1: sums of 16 queries, 2: these queries; 3, 4 and 5: the same for the last,
// incomplete tile of queries; 6 and 7: keys or values.
class AttentionTiles : Registers {
 public:
  // ``add_all_products`` for an even number of vectors and a multiple of 16 pairs.
  void add(const words* left, int64_t vectors, const uint16_t* right, int64_t right_stride, int64_t pairs, float* sums,
           int64_t queries) {
    int64_t stride = vectors * 16, query = 0;
    uint8_t last = queries % 16 ? queries % 16 : 16;
    configure({16, 16, 16, last, last, last, 16, 16});
    asm volatile("" : : : "memory");
    for (; query + 16 <= queries; query += 16) {
      MMSPEC_ADD_QUERIES(0, 1, 2)
    }
    if (query < queries) {
      MMSPEC_ADD_QUERIES(3, 4, 5)
    }
    asm volatile("" : : : "memory");
  }
};

}  // namespace
#else
namespace {

struct AttentionTiles {
  template <class... T>
  void add(T...) {}
};

}  // namespace
#endif
