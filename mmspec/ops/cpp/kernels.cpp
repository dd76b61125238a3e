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

// Applies rotary positions to a head with adjacent feature pairs.
void turn_head(float* head, int64_t head_dim, const float* rotation) {
  for (int64_t i = 0; i < head_dim; i += 2) {
    float a = head[i], b = head[i + 1], cosine = rotation[i], sine = rotation[i + 1];
    head[i] = a * cosine - b * sine, head[i + 1] = a * sine + b * cosine;
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

thread_local Rows inputs, hidden, normed;
thread_local std::vector<float> between;

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

}  // extern "C"

namespace {

// Converts a layer's inputs, normed if it has a norm.
void take_inputs(const Layer& layer, Rows& x, const float* from, int64_t rows) {
  const Linear& linear = layer.qkv;
  if (!layer.attention_norm) return take(linear, x, from, rows);
  if (layer.parts == 1) return take_normed(linear, x, from, rows, layer.attention_norm, layer.attention_epsilon);
  int64_t features = linear.in / layer.parts;
  between.resize(rows * linear.in);
  float* to = between.data();  // of this thread
  each(rows * layer.parts, features, [&](int64_t i) {
    const float* norm = layer.attention_norm + i % layer.parts * features;
    norm_row(from + i * features, features, norm, layer.attention_epsilon, to + i * features);
  });
  take(linear, x, to, rows);
}

// Heads from ``first`` on of queries, keys and values of rows, see ``attention_inputs``; calls then(row, head, values).
template <class Then>
void project_heads(const Layer& layer, const Rows& x, int64_t rows, const float* rotation, int64_t first, float* qkv,
                   const Then& then) {
  int64_t head_dim = layer.head_dim, turned = layer.heads + layer.kv_heads, blocks = head_dim / BLOCK;
  parts_of(turned + layer.kv_heads - first, least_of(layer.qkv, head_dim), [&](int64_t begin, int64_t end) {
    Tiles tiles;
    products(layer.qkv, (first + begin) * blocks, (end - begin) * blocks, {x, rows, qkv, layer.qkv.out}, tiles);
    for (int64_t row = 0; row < rows; row++)
      for (int64_t head = first + begin; head < first + end; head++) {
        float* values = qkv + row * layer.qkv.out + head * head_dim;
        const float* norm = layer.head_norm ? layer.head_norm + head * head_dim : nullptr;
        if (norm && head < turned) norm_row(values, head_dim, norm, layer.head_epsilon, values);
        if (head < turned) turn_head(values, head_dim, rotation + row * head_dim);
        then(row, head, values);
      }
  });
}

// Attention to nodes, converted to inputs of the next layer, whose features are a multiple of 32.
void attend_then_take(const Attention& a, const Linear& layer, Rows& x) {
  if (a.heads / a.kv_heads * a.head_dim % GROUP) {
    attend_all(a);
    return take(layer, x, a.read, a.batch * a.nodes);
  }
  x.shape(layer.in, a.batch * a.nodes);
  attend_all(a, [&](int64_t first, int64_t nodes, int64_t feature, int64_t features) {
    for (int64_t row = first; row < first + nodes; row++)
      for (int64_t i = feature; i < feature + features; i += GROUP)
        x.set(Kind(layer.kind), row, i / GROUP, a.read + row * layer.in + i);
  });
}

// A layer's output (rows, hidden) from inputs of its output projection and the residual. middle: the residual before
// the MLP, (rows, hidden); may be null. Also converts the inputs of the
// ``next`` layer, unless it is null.
void rest_of_layer(const Layer& layer, const Rows& read, const float* residual, int64_t rows, float* out,
                   float* middle, const Layer* next) {
  auto add = [&](const Linear& linear, const Rows& x, const float* before, const float* after, const Linear* then,
                 const float* norm, float epsilon, Rows& to) {
    if (!after && then) return product_then_norm(linear, x, rows, out, before, *then, to, norm, epsilon);
    if (!after) return product(linear, x, rows, out, before);
    between.resize(rows * linear.out);
    product(linear, x, rows, between.data());
    add_normed(between.data(), before, rows, linear.out, after, layer.after_epsilon, out);
    if (then) take_normed(*then, to, out, rows, norm, epsilon);
  };
  add(layer.read, read, residual, layer.attention_after, &layer.gate_up, layer.mlp_norm, layer.mlp_epsilon, normed);
  if (middle) std::memcpy(middle, out, rows * layer.read.out * sizeof(float));
  gated_product(layer.gate_up, normed, rows, {layer.gelu != 0}, layer.down, hidden);
  add(layer.down, hidden, out, layer.mlp_after, next ? &next->qkv : nullptr, next ? next->attention_norm : nullptr,
      next ? next->attention_epsilon : 0, inputs);
}

}  // namespace

extern "C" {

// A forward pass through all decoder layers. New keys and values go to the last slots of a cache (layers, 2, rows,
// kv_heads, slots, head_dim); ``attention`` describes its first layer.
struct Pass {
  const Layer* layers;
  int64_t count, hidden;
  const float *x, *rotation;
  float* states;  // (layers, batch * nodes, hidden): each layer's output
  float* middle;  // (batch * nodes, hidden): the last layer's residual before its MLP; may be null
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
  Team team(threads);
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first);
    take_inputs(*layer, inputs, x + first * layer->qkv.in, count);
    project_heads(*layer, inputs, count, rotation + first * layer->head_dim, 0, qkv + first * layer->qkv.out,
                  [](int64_t, int64_t, const float*) {});
  }
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

// The rest of a layer: out (rows, hidden) from the attention output (rows, heads * head_dim) and the residual x.
void layer_outputs(const Layer* layer, const float* read, const float* x, int64_t rows, float* out, int threads) {
  Team team(threads);
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first), at = first * layer->read.out;
    take(layer->read, inputs, read + first * layer->read.in, count);
    rest_of_layer(*layer, inputs, x + at, count, out + at, nullptr, nullptr);
  }
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

// The token of each row at which the cumulative distribution softmax(row) exceeds uniform[row].
void quantiles_of_rows(const float* x, int64_t rows, int64_t count, const float* uniform, int64_t* tokens,
                       int threads) {
  Team team(threads);
  each(rows, count, [&](int64_t row) { tokens[row] = quantile_of(x + row * count, count, uniform[row]); });
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

// Attention to the nodes from ``first`` on, counted over all rows: several whole rows, or nodes of one.
static Attention nodes_of(Attention a, int64_t first, int64_t count) {
  int64_t row = first / a.nodes, node = first % a.nodes, nodes = std::min(count, a.nodes);
  a.query += first * a.query_node, a.key += row * a.key_row, a.value += row * a.key_row;
  if (a.mask) a.mask += row * a.mask_row + node * a.mask_node;
  else a.slots -= a.nodes - node - nodes;
  a.batch = count / nodes, a.nodes = nodes;
  return a;
}

void decode(const Pass* pass, int threads) {
  Team team(threads);
  Attention whole = pass->attention;
  int64_t rows = whole.batch * whole.nodes, width = (whole.heads + 2 * whole.kv_heads) * whole.head_dim;
  auto count_from = [=](int64_t first) {  // whole rows, or nodes of one
    return whole.nodes < CHUNK ? std::min(CHUNK / whole.nodes * whole.nodes, rows - first)
                               : std::min(CHUNK, whole.nodes - first % whole.nodes);
  };
  std::vector<float> qkv(rows * width), read(std::min(rows, CHUNK) * whole.heads * whole.head_dim);
  whole.query = qkv.data(), whole.read = read.data(), whole.query_row = whole.nodes * width, whole.query_node = width;
  const float* x = pass->x;
  bool taken = false;  // ``inputs`` are the layer's inputs
  for (int64_t index = 0; index < pass->count; index++) {
    const Layer &layer = pass->layers[index], *next = index + 1 < pass->count ? &layer + 1 : nullptr;
    if (next && (count_from(0) < rows || !next->attention_norm || next->parts > 1)) next = nullptr;
    Attention a = of_layer(whole, index);
    for (int64_t first = 0, count; first < rows; first += count) {
      count = count_from(first);
      if (!taken) take_inputs(layer, inputs, x + first * layer.qkv.in, count);
      project_heads(layer, inputs, count, pass->rotation + first * a.head_dim, 0, qkv.data() + first * width,
                    [&](int64_t row, int64_t head, const float* from) {
                      int64_t key = head - a.heads;
                      if (key >= 0) store_slot(a, key < a.kv_heads, first + row, key % a.kv_heads, from);
                    });
    }
    float* out = pass->states + index * rows * pass->hidden;
    if (layer.parts > 1 || layer.normed_residual) residual_of(&layer, x, rows, pass->hidden, out), x = out;
    for (int64_t first = 0, count; first < rows; first += count) {
      count = count_from(first);
      int64_t at = first * pass->hidden;
      attend_then_take(nodes_of(a, first, count), layer.read, inputs);
      float* middle = pass->middle && index + 1 == pass->count ? pass->middle + at : nullptr;
      rest_of_layer(layer, inputs, x + at, count, out + at, middle, next);
    }
    x = out, taken = next;
  }
}

// Writes the keys and values of each layer for the rows of ``x``, skipping the norm before attention.
void write_keys_values(const Pass* pass, int threads) {
  Team team(threads);
  const Attention& whole = pass->attention;
  int64_t rows = whole.batch * whole.nodes, width = pass->layers->qkv.out;
  std::vector<float> qkv(std::min(rows, CHUNK) * width);
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first);
    for (int64_t index = 0; index < pass->count; index++) {
      const Linear& qkv_of = pass->layers[index].qkv;
      Attention a = of_layer(whole, index);
      take(qkv_of, inputs, pass->x + first * qkv_of.in, count);
      project_heads(pass->layers[index], inputs, count, pass->rotation + first * a.head_dim, a.heads, qkv.data(),
                    [&](int64_t row, int64_t head, const float* from) {
                      store_slot(a, head < a.heads + a.kv_heads, first + row, (head - a.heads) % a.kv_heads, from);
                    });
    }
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
