// CPU kernels: products with quantised weights, tree attention, decoder layers, top-k logits, sampling, draft trees.
//
// Results are bitwise identical for any number of rows and threads, and attention for any placement of the attended
// slots: a token in a tree gets exactly the same result as in plain decoding.

#include "attention.h"
#include "drafting.h"
#include "limits.h"
#include "stored.h"
#include "sublayers.h"

namespace {

// Applies norm and rotary positions to heads with adjacent feature pairs; null ``norm``: no norm.
void turn_heads(float* head, int64_t count, int64_t head_dim, const float* norm, float epsilon, const float* rotation) {
  for (const float* end = head + count * head_dim; head < end; head += head_dim) {
    if (norm) norm_row(head, head_dim, norm, epsilon, head), norm += head_dim;
    for (int64_t i = 0; i < head_dim; i += 2) {
      float a = head[i], b = head[i + 1], cosine = rotation[i], sine = rotation[i + 1];
      head[i] = a * cosine - b * sine, head[i + 1] = a * sine + b * cosine;
    }
  }
}

// out = residual + RMSNorm(rows); overwrites the rows.
void add_normed(float* from, const float* residual, int64_t rows, int64_t features, const float* gain, float epsilon,
                float* out) {
  each(rows, features, [&](int64_t row) {
    norm_row(from + row * features, features, gain, epsilon, from + row * features);
    for (int64_t i = row * features; i < (row + 1) * features; i++) out[i] = residual[i] + from[i];
  });
}

thread_local Rows inputs, hidden;
thread_local std::vector<float> gates;

}  // namespace

extern "C" {

// A pre-norm decoder layer. Inputs may have several parts with separate norms; the last is the residual. Null: no norm.
struct Layer {
  Linear qkv, read, gate_up, down;
  const float *attention_norm, *mlp_norm;
  const float *attention_after, *mlp_after;  // norms of the outputs of attention and MLP
  const float* head_norm;                    // norm of query and key heads, (heads + kv_heads, head_dim)
  float attention_epsilon, mlp_epsilon, after_epsilon, head_epsilon;
  int64_t heads, kv_heads, head_dim;
  int64_t gelu;  // activation is GELU instead of SiLU
  int64_t parts;
  int64_t normed_residual;  // the residual is the normed input
};

// A forward pass through all decoder layers. New keys and values go to the slots from ``start`` on of a cache (layers,
// 2, rows, kv_heads, slots, head_dim); ``attention`` describes one layer of it.
struct Pass {
  const Layer* layers;
  int64_t count, hidden, start;
  const float *x, *rotation;
  float* states;  // (layers, batch * nodes, hidden): each layer's output
  float* middle;  // (batch * nodes, hidden): the last layer's residual before its MLP; may be null
  uint16_t* cache;  // bfloat16
  int64_t cache_part;  // stride between the keys and the values of a layer
  Attention attention;
};

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

// Dequantises rows to out (count, features), whole groups; returns false if the file is too short.
int dense_rows(int64_t format, const int64_t* places, int64_t count, int64_t features, int file, float* out,
               int threads) {
  Team team(threads);
  int64_t groups = groups_of(features);
  return with_format(Stored(format), [&](auto of) {
    constexpr Stored stored = decltype(of)::value;
    return each_block({places, count, row_bytes(stored, groups), file}, [&](int64_t first, const uint8_t* const* rows) {
      for (int64_t i = 0; i < BLOCK && rows[i]; i++)
        dense_row<stored>(rows[i], groups, out + (first + i) * groups * GROUP);
    });
  });
}

// Queries and keys, with optional norms and rotary positions, and values: x (rows, parts * hidden) -> qkv (rows, heads
// + 2 kv_heads, head_dim). rotation: (rows, head_dim / 2, 2), cosine and sine of each adjacent feature pair.
void attention_inputs(const Layer* layer, const float* x, const float* rotation, int64_t rows, float* qkv,
                      int threads) {
  const Linear& linear = layer->qkv;
  int64_t head_dim = layer->head_dim;
  Rows& operand = inputs;
  Team team(threads);
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first);
    float* out = qkv + first * linear.out;
    if (layer->attention_norm)
      take_normed(linear, operand, x + first * linear.in, count, layer->attention_norm, layer->attention_epsilon,
                  layer->parts);
    else
      take(linear, operand, x + first * linear.in, count);
    product(linear, operand, count, out);
    each(count, linear.out, [&](int64_t row) {
      turn_heads(out + row * linear.out, layer->heads + layer->kv_heads, head_dim, layer->head_norm,
                 layer->head_epsilon, rotation + (first + row) * head_dim);
    });
  }
}

// Masked softmax attention of nodes; head_dim is a multiple of 16, at most 256.
void attention(const Attention* a, int threads) {
  Team team(threads);
  attend_all(*a);
}

// The rest of a layer: out (rows, hidden) from the attention output (rows, heads * head_dim) and the residual x.
// middle: the residual before the MLP, (rows, hidden); may be null.
void layer_outputs(const Layer* layer, const float* read, const float* x, int64_t rows, float* out, float* middle,
                   int threads) {
  const Linear &first_linear = layer->read, &gate_up = layer->gate_up, &down = layer->down;
  Rows &operand = inputs, &gated = hidden;
  std::vector<float>& between = gates;
  int64_t gate_stride = gate_up.out + LANES;  // powers of two would map rows to the same cache lines
  int64_t widest = std::max(gate_stride, down.out);
  Team team(threads);
  if (between.size() < size_t(CHUNK * widest)) between.resize(CHUNK * widest);
  // out = x + product, or x + RMSNorm(product)
  auto add = [&](const Linear& linear, const Rows& rows_of, int64_t count, const float* residual, const float* norm,
                 float* to) {
    if (!norm) return product(linear, rows_of, count, to, residual);
    product(linear, rows_of, count, between.data());
    add_normed(between.data(), residual, count, linear.out, norm, layer->after_epsilon, to);
  };
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first), at = first * first_linear.out;
    take(first_linear, operand, read + first * first_linear.in, count);
    add(first_linear, operand, count, x + at, layer->attention_after, out + at);
    if (middle) std::memcpy(middle + at, out + at, count * first_linear.out * sizeof(float));
    take_normed(gate_up, operand, out + at, count, layer->mlp_norm, layer->mlp_epsilon);
    product(gate_up, operand, count, between.data(), nullptr, gate_stride);
    take_gated(down, gated, between.data(), gate_stride, count, {layer->gelu != 0});
    add(down, gated, count, out + at, layer->mlp_after, out + at);
  }
}

// out (rows, hidden) = the sum of the chosen experts' outputs times their weights; chosen, weights: (rows, used).
void expert_outputs(const Experts* experts, const float* x, int64_t rows, int64_t used, const int64_t* chosen,
                    const float* weights, float* out, int threads) {
  Team team(threads);
  Experts some = *experts;
  some.used = used;
  std::fill(out, out + rows * (some.down.out / some.count), 0.0f);
  add_experts(some, {x, nullptr, 0}, rows, chosen, weights, out);
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

// The token of each row at which the cumulative distribution softmax(row) exceeds uniform[row].
void quantiles_of_rows(const float* x, int64_t rows, int64_t count, const float* uniform, int64_t* tokens,
                       int threads) {
  Team team(threads);
  each(rows, count, [&](int64_t row) { tokens[row] = quantile_of(x + row * count, count, uniform[row]); });
}

// Writes keys and values to cache slots from ``start`` on; ``from``: (rows, stride), keys and values adjacent.
static void write_slots(const Pass* pass, int64_t index, const float* from, int64_t stride) {
  const Attention& a = pass->attention;
  int64_t kv_width = a.kv_heads * a.head_dim;
  for (int64_t row = 0; row < a.batch * a.nodes; row++)
    for (int part = 0; part < 2; part++) {
      uint16_t* to = pass->cache + (2 * index + part) * pass->cache_part + row / a.nodes * a.key_row +
                     (pass->start + row % a.nodes) * a.key_slot;
      for (int64_t head = 0; head < a.kv_heads; head++)
        store_rounded(to + head * a.key_head, from + row * stride + part * kv_width + head * a.head_dim, a.head_dim);
    }
}

// The residual of a layer with several input parts or a normed residual, (rows, hidden).
static void residual_of(const Layer* layer, const float* x, int64_t rows, int64_t hidden, float* out) {
  int64_t skipped = (layer->parts - 1) * hidden;
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x + row * layer->qkv.in + skipped;
    if (layer->normed_residual)
      norm_row(from, hidden, layer->attention_norm + skipped, layer->attention_epsilon, out + row * hidden);
    else
      std::memcpy(out + row * hidden, from, hidden * sizeof(float));
  }
}

void decode(const Pass* pass, int threads) {
  Team team(threads);
  Attention a = pass->attention;
  int64_t rows = a.batch * a.nodes, width = (a.heads + 2 * a.kv_heads) * a.head_dim;
  std::vector<float> qkv(rows * width), read(rows * a.heads * a.head_dim);
  a.query = qkv.data(), a.read = read.data(), a.query_row = a.nodes * width, a.query_node = width;
  const float* x = pass->x;
  for (int64_t index = 0; index < pass->count; index++) {
    const Layer* layer = pass->layers + index;
    attention_inputs(layer, x, pass->rotation, rows, qkv.data(), threads);
    write_slots(pass, index, qkv.data() + a.heads * a.head_dim, width);
    a.key = pass->cache + 2 * index * pass->cache_part, a.value = a.key + pass->cache_part;
    attention(&a, threads);
    float* out = pass->states + index * rows * pass->hidden;
    if (layer->parts > 1 || layer->normed_residual) residual_of(layer, x, rows, pass->hidden, out), x = out;
    layer_outputs(layer, read.data(), x, rows, out, index + 1 < pass->count ? nullptr : pass->middle, threads);
    x = out;
  }
}

// Writes the keys and values of each layer for the rows of ``x``, skipping the norm before attention.
void write_keys_values(const Pass* pass, int threads) {
  Team team(threads);
  const Attention& a = pass->attention;
  int64_t rows = a.batch * a.nodes, kv_width = a.kv_heads * a.head_dim;
  std::vector<float> kv(rows * 2 * kv_width);
  for (int64_t index = 0; index < pass->count; index++) {
    const Layer* layer = pass->layers + index;
    Linear part = outputs_from(layer->qkv, a.heads * a.head_dim);
    linear(&part, pass->x, rows, kv.data(), threads);
    for (int64_t row = 0; row < rows; row++) {
      const float* norm = layer->head_norm ? layer->head_norm + a.heads * a.head_dim : nullptr;
      turn_heads(kv.data() + row * 2 * kv_width, a.kv_heads, a.head_dim, norm, layer->head_epsilon,
                 pass->rotation + row * a.head_dim);
    }
    write_slots(pass, index, kv.data(), 2 * kv_width);
  }
}

// Runs a decoder of residual sublayers.
void decode_sublayers(const TreePass* pass, int threads) {
  Team team(threads);
  TreeDecoder(*pass).run(inputs);
}

// Advances the states of recurrent layers along a path of each row, (batch, depth) padded with -1.
void advance_states(const Sublayer* sublayers, int64_t count, const Recurrent* states, const int64_t* path,
                    int64_t batch, int64_t depth, int threads) {
  Team team(threads);
  advance_rows(sublayers, count, *states, path, batch, depth);
}

}  // extern "C"
