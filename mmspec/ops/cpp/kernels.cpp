// CPU kernels: products with quantised weights, tree attention, decoder layers, top-k logits, sampling, draft trees.
//
// Results are bitwise identical for any number of rows and threads, and attention for any placement of the attended
// slots: a token in a tree gets exactly the same result as in plain decoding.

#include "attention.h"
#include "drafting.h"
#include "limits.h"
#include "stored.h"
#include "sublayers.h"

extern "C" {

// out (rows, out) = x (rows, in) W^T + bias
void linear(const Linear* layer, const float* x, int64_t rows, float* out, int threads) {
  Rows& operand = inputs;
  Team team(threads);
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first);
    take(*layer, operand, x + first * layer->in, count);
    product(*layer, operand, count, out + first * layer->out);
  }
}

// Bytes of a layer's weights in blocks.
int64_t bytes_of_blocks(int64_t kind, int64_t in, int64_t out) {
  return (out + BLOCK - 1) / BLOCK * block_bytes(Kind(kind), groups_of(in));
}

// Bytes per row in a GGUF format.
int64_t bytes_of_row(int64_t format, int64_t features) { return row_bytes(Stored(format), groups_of(features)); }

// Rows in a GGUF format to convert to ``blocks``: addresses if ``file`` is -1, else offsets in the file.
struct Packing {
  const int64_t* places;
  uint8_t* blocks;
  int64_t format, count, features, file;
};

// Returns the number n of completed packings: stops at the first packing whose file is too short. If the next packing
// contains non-finite scales, returns -1 - n.
int64_t pack_rows(const Packing* packings, int64_t count, int threads) {
  Team team(threads);
  for (const Packing* p = packings; p < packings + count; p++) {
    int64_t groups = groups_of(p->features);
    std::atomic<bool> finite{true};
    bool done = with_format(Stored(p->format), [&](auto of) {
      constexpr Stored stored = decltype(of)::value;
      int64_t size = block_bytes(stored_kind[int64_t(stored)], groups);
      Places places{p->places, p->count, row_bytes(stored, groups), int(p->file)};
      return each_block(places, [&](int64_t first, const uint8_t* const* rows) {
        if (!pack_block<stored>(rows, groups, p->blocks + first / BLOCK * size)) finite = false;
      });
    });
    if (!done) return p - packings;
    if (!finite) return packings - p - 1;
  }
  return count;
}

// Dequantises rows to out (count, features), whole groups; returns 0 if the file is too short, -1 if a number is not
// finite, else 1.
int dense_rows(int64_t format, const int64_t* places, int64_t count, int64_t features, int file, float* out,
               int threads) {
  Team team(threads);
  int64_t groups = groups_of(features);
  std::atomic<bool> finite{true};
  bool done = with_format(Stored(format), [&](auto of) {
    constexpr Stored stored = decltype(of)::value;
    return each_block({places, count, row_bytes(stored, groups), file}, [&](int64_t first, const uint8_t* const* rows) {
      for (int64_t i = 0; i < BLOCK && rows[i]; i++) {
        float* to = out + (first + i) * groups * GROUP;
        dense_row<stored>(rows[i], groups, to);
        if (!std::all_of(to, to + groups * GROUP, [](float x) { return std::isfinite(x); })) finite = false;
      }
    });
  });
  return !done ? 0 : finite ? 1 : -1;
}

// Heads of keys, less their centres, or of values, (rows, head_dim), in int8: (rows, head_dim + 4).
void int8_heads(const float* x, int64_t rows, int64_t head_dim, int is_key, uint8_t* out, int threads) {
  static const float none[256] = {};
  Team team(threads);
  each(rows, head_dim, [&](int64_t row) {
    store_int8(x + row * head_dim, is_key ? none : nullptr, head_dim, out + row * (head_dim + 4));
  });
}

// Masked softmax attention of nodes; head_dim is a multiple of 16, at most 256.
void attention(const Attention* a, int threads) {
  Team team(threads);
  attend_all(*a);
}

// out (rows, hidden) = the sum of the chosen experts' outputs times their weights; chosen, weights: (rows, used).
void expert_outputs(const Experts* experts, const float* x, int64_t rows, int64_t used, const int64_t* chosen,
                    const float* weights, float* out, int threads) {
  Team team(threads);
  std::fill(out, out + rows * (experts->down.out / experts->count), 0.0f);
  add_experts(*experts, {x, nullptr, 0}, rows, used, chosen, weights, out);
}

// The experts of each row, by its logits (rows, count), and their weights: (rows, used).
void chosen_experts(const Router* router, const float* logits, int64_t rows, int64_t* chosen, float* weights,
                    int threads) {
  Team team(threads);
  choose_experts_of_rows(*router, logits, router->count, rows, chosen, weights);
}

// Top-k of each row, k <= count: values (rows, k), optionally of log_softmax, and indices.
void greatest_of_rows(const float* x, int64_t rows, int64_t count, int64_t k, int log_softmax, float* best,
                      int64_t* places, int threads) {
  Team team(threads);
  each(rows, count, [&](int64_t row) {
    greatest_of(x + row * count, count, k, best + row * k, places + row * k);
    if (!log_softmax) return;
    float most = best[row * k], total = most + std::log(total_of(x + row * count, count, most));
    for (int64_t i = 0; i < k; i++) best[row * k + i] -= total;
  });
}

// out (rows, features) = RMSNorm(x); features: a multiple of LANES.
void norm_rows(const float* x, int64_t rows, int64_t features, const float* gain, float epsilon, float* out,
               int threads) {
  Team team(threads);
  each(rows, features, [&](int64_t row) { norm_row(x + row * features, features, gain, epsilon, out + row * features); });
}

// The token of each row at which the cumulative distribution softmax(row) exceeds uniform[row].
void quantiles_of_rows(const float* x, int64_t rows, int64_t count, const float* uniform, int64_t* tokens,
                       int threads) {
  Team team(threads);
  each(rows, count, [&](int64_t row) { tokens[row] = quantile_of(x + row * count, count, uniform[row]); });
}

// Runs a decoder of residual sublayers.
void decode_sublayers(const TreePass* pass, int threads) {
  Team team(threads);
  TreeDecoder{*pass}.run();
}

// Writes the keys and values of sublayers with attention for the rows of ``x``, which are not normed.
void write_keys_values(const TreePass* pass, int threads) {
  Team team(threads);
  TreeDecoder{*pass}.write_keys_values();
}

// Advances the states of recurrent layers along a path of each row, (batch, depth) padded with -1.
void advance_states(const Sublayer* sublayers, int64_t count, const Recurrent* states, const int64_t* path,
                    int64_t batch, int64_t depth, int threads) {
  Team team(threads);
  advance_rows(sublayers, count, *states, path, batch, depth);
}

}  // extern "C"
