// Products of a layer and attention, where MMSPEC_LOOPS is defined with AMX's instructions replaced by loops.

#if defined(MMSPEC_LOOPS)
#include "tiles.h"
#endif

#include "../../../mmspec/ops/cpp/attention.h"
#include "../../../mmspec/ops/cpp/products.h"

extern "C" void products(const Linear* layer, const float* x, int64_t rows, float* out, int threads) {
  Rows operand;
  Team team(threads);
  take(*layer, operand, x, rows);
  product(*layer, operand, rows, out);
}

extern "C" void attention(const Attention* a, int threads) {
  Team team(threads);
  attend_all(*a);
}

// Instructions on tile registers so far, as far as they are loops.
extern "C" int64_t tile_products() {
#if defined(MMSPEC_LOOPS)
  return loops::products;
#else
  return 0;
#endif
}
