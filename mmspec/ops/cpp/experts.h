// Mixtures of experts: gated MLPs, of which each row uses a few.
//
// Each pair of a row and an expert has a slot; slots are grouped by expert. A row's result is computed by the same
// operations, in the order of its experts, for any number of rows and threads.

#pragma once

#include "products.h"
#include "router.h"

extern "C" {

// Outputs of a layer are those of all experts, one expert after the other; multiples of 32 for each.
struct Experts {
  Linear gate_up, up, down;  // gates and ups in one layer; or gates, and ups in ``up``, whose blocks are null otherwise
  int64_t count;
  int64_t gelu;  // activation is GELU instead of SiLU
  float alpha, limit;  // of ``Gating``
};

}  // extern "C"

namespace {

constexpr int64_t MOST_SLOTS = 2048;  // of a pass over the weights

// Up to 16 slots of one expert, within a tile of ``Rows``.
struct ExpertTile {
  int64_t expert, first;
  int rows;
  int64_t begin, tiles;  // first of the expert's tiles and their number
};

// Slots of rows, for their chosen experts (rows, used); numbers out of range are skipped.
struct Slots {
  std::vector<int64_t> of;  // (rows, used), -1: skipped
  std::vector<ExpertTile> tiles;
  int64_t count = 0;

  Slots(const Experts& experts, const int64_t* chosen, int64_t choices) : of(choices, -1) {
    std::vector<int64_t> next(experts.count + 1);
    auto known = [&](int64_t expert) { return 0 <= expert && expert < experts.count; };
    for (int64_t i = 0; i < choices; i++)
      if (known(chosen[i])) next[chosen[i] + 1]++;
    for (int64_t expert = 0; expert < experts.count; expert++) {
      int64_t begin = int64_t(tiles.size());
      next[expert + 1] += next[expert];
      for (int64_t end = next[expert + 1]; count < end;) {
        int64_t rows = std::min(end, (count / MOST_ROWS + 1) * MOST_ROWS) - count;
        tiles.push_back({expert, count, int(rows), begin, 0}), count += rows;
      }
      for (size_t i = begin; i < tiles.size(); i++) tiles[i].tiles = int64_t(tiles.size()) - begin;
    }
    for (int64_t i = 0; i < choices; i++)
      if (known(chosen[i])) of[i] = next[chosen[i]]++;
  }
};

// Products of each slot's row with its expert's weights: out (slots, stride). A tile's blocks are in a row of
// items, and tiles of one expert take turns at a block.
void slot_products(const Linear& layer, const Experts& experts, const Slots& slots, const Rows& x, float* out,
                   int64_t stride) {
  int64_t blocks = layer.out / experts.count / BLOCK;
  with_kind(layer.kind, [&](auto kind) {
    parts_of(int64_t(slots.tiles.size()) * blocks, 1, [&](int64_t begin, int64_t end) {
      Tiles registers;
      floats sums[MOST_ROWS * PARTS];
      for (int64_t item = begin; item < end; item++) {
        const ExpertTile& some = slots.tiles[item / blocks];
        int64_t place = item - some.begin * blocks, block = place / some.tiles;
        const ExpertTile& tile = slots.tiles[some.begin + place % some.tiles];
        int64_t column = (tile.expert * blocks + block) * BLOCK;
        block_outputs<decltype(kind)::value>(layer, column, x, tile.first, tile.rows, registers, sums);
        for (int64_t i = 0; i < tile.rows * PARTS; i++)
          store(out + (tile.first + i / PARTS) * stride + block * BLOCK + i % PARTS * LANES, sums[i]);
      }
    });
  });
}

// Rows of inputs, (rows, features); with a gain, RMSNorm is applied.
struct ExpertInputs {
  const float *x, *gain;
  float epsilon;
};

// Buffers of a thread.
struct ExpertBuffers {
  Rows inputs, gated;
  Lines<float> between, outputs;
};

// out (rows, down.out / count) += the sum of chosen experts' outputs times their weights, (rows, used).
void add_experts(const Experts& experts, const ExpertInputs& from, int64_t rows, int64_t used, const int64_t* chosen,
                 const float* weights, float* out) {
  thread_local ExpertBuffers own;
  ExpertBuffers& buffers = own;  // of this thread, in all threads of the team
  int64_t in = experts.gate_up.in, inner = experts.down.in, hidden = experts.down.out / experts.count;
  int64_t stride = 2 * inner + LANES;  // powers of two would map rows to the same cache lines
  int64_t most = std::max(int64_t(1), MOST_SLOTS / used);
  for (int64_t first = 0; first < rows; first += most) {
    int64_t choices = std::min(most, rows - first) * used;
    Slots slots(experts, chosen + first * used, choices);
    buffers.between.reserve(slots.count * stride), buffers.outputs.reserve(slots.count * hidden);
    float *between = &buffers.between[0], *outputs = &buffers.outputs[0];
    buffers.inputs.shape(in, slots.count);
    each(choices, in, [&](int64_t choice) {
      const float* x = from.x + (first + choice / used) * in;
      floats factor = from.gain ? norm_factor(x, in, from.epsilon) : floats{};
      float normed[GROUP];
      for (int64_t at = 0; slots.of[choice] >= 0 && at < in; at += GROUP) {
        for (int64_t i = at; from.gain && i < at + GROUP; i += LANES)
          store(normed + i - at, load<floats>(x + i) * factor * load<floats>(from.gain + i));
        buffers.inputs.set(Kind(experts.gate_up.kind), slots.of[choice], at / GROUP, from.gain ? normed : x + at);
      }
    });
    slot_products(experts.gate_up, experts, slots, buffers.inputs, between, stride);
    if (experts.up.blocks) slot_products(experts.up, experts, slots, buffers.inputs, between + inner, stride);
    take_gated(experts.down, buffers.gated, between, stride, slots.count,
               {experts.gelu, experts.alpha, experts.limit});
    slot_products(experts.down, experts, slots, buffers.gated, outputs, hidden);
    each(choices / used, used * hidden, [&](int64_t row) {
      float* to = out + (first + row) * hidden;
      for (int64_t choice = row * used; choice < (row + 1) * used; choice++)
        for (int64_t i = 0, slot = slots.of[choice]; slot >= 0 && i < hidden; i += LANES) {
          floats y = load<floats>(outputs + slot * hidden + i);
          store(to + i, fma(splat(weights[first * used + choice]), y, load<floats>(to + i)));
        }
    });
  }
}

}  // namespace
