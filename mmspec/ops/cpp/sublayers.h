// Decoders of residual sublayers, x += scale * f(RMSNorm(x)) or x += RMSNorm(f(x)): attention, recurrent mixers, short
// convolutions, MLPs and mixtures of experts.
//
// A product's loop also converts its outputs to the inputs of the next product, in the thread that computed them. So a
// layer of attention and a gated MLP takes five loops: queries, keys and values, with norms, rotation and the cache's
// new slots; attention; output projection; gate and up with the activation; down.
//
// A recurrent mixer has a state S per head and computes, at each node of a tree, S = decay * S' + key (x) update, where
// S' is the state after the node's parent. Nodes are visited depth first: a node's result is computed by the same
// operations, in the same order, as in plain decoding of its path. A pass over a tree does not change the states before
// it; it records keys, updates and decays, from which ``advance_rows`` computes the states after an accepted path. A
// pass over a prompt, a chain of which all nodes are accepted, advances the states itself.

#pragma once

#include "attention.h"
#include "experts.h"

extern "C" {

// Null pointers and zeros for parts that a kind does not have.
struct Sublayer {
  const Linear* inputs;  // projections of the normed input, with adjacent outputs
  Linear out;
  const float *norm, *after;               // gains of norms of the input, (parts, hidden), and of the output
  const float* inner_norm;                 // attention: (heads + groups, head_dim); mixers: gain of the gated norm
  const float* output_scale;               // of the projections' outputs, (outputs)
  const float* sinks;                      // attention: (heads), scores without values
  const float *taps, *tap_bias;            // convolution: (width, channels), (channels)
  const float *decay, *step_bias, *skip;   // (heads)
  float epsilon, after_epsilon, inner_epsilon, scale, attention_scale, gate_scale;
  int64_t kind, projections;
  int64_t ends_layer, beside;                    // whether the output is a layer's; whether the input is that of the
                                                 // sublayer before it
  int64_t parts, normed_residual;                // of the input, each with its norm, of which the last is the residual;
                                                 // whether the residual is the normed input
  int64_t heads, groups, head_dim, key_dim;      // groups: heads of keys
  int64_t rotated, gated;                        // attention: rotated features of a head; whether outputs have gates
  int64_t rotation, windowed;                    // index of the rotations; whether attention is by ``window``
  int64_t interleaved;                           // see ``DeltaColumns``
  int64_t width, channels, first_channel;        // convolution: taps; channels, and the first among all layers'
  int64_t place;                                 // index among layers with keys and values, or with states
  int64_t activation, norm_groups;               // of an MLP; groups of features of a mixer's norm
  const Experts* experts;  // inputs: router, shared MLP, its gate if ``gated``; out: of the shared MLP, if any
  const Router* router;
};

// Buffers of a decoder's recurrent states and of a pass's nodes. All strides are in elements.
struct Recurrent {
  float *conv_state, *state;    // (rows, channels, width - 1), (rows, units, heads, ...)
  float *inputs, *record;       // (rows, nodes, channels), (rows, nodes, units, recorded); null for a prompt
  int64_t channels, width, state_row, unit, recorded, units, nodes;
};

struct TreePass {
  const Sublayer* sublayers;
  int64_t count, hidden;
  const float *x, *rotation;  // rotation: (rotations, batch * nodes, 2, rotated / 2), cosines and sines
  float* states;              // (layers, batch * nodes, hidden)
  const uint8_t* ancestors;   // (batch, nodes, nodes); null for a prompt
  const int64_t* first;       // (batch): first token of each row of a prompt, after padding; null: 0
  Attention attention;        // of the first layer of a cache (layers, 2, rows, groups, slots, ...); new in the last slots
  const uint8_t* window;      // mask of attention with a window; null: that of ``attention``
  int64_t window_row, window_node;
  Recurrent recurrent;
};

}  // extern "C"

namespace {

enum Mixing : int64_t { ATTENTION, GATED_DELTA, MAMBA2, SHORT_CONV, MLP, EXPERTS };

constexpr int64_t WINDOW = 8;    // maximum taps of a convolution
constexpr int64_t COLUMNS = 32;  // values of a head computed together at all nodes: their state stays in L1

// A node of a row in depth-first order. States are in slots: ``from`` the parent's (-1: the state before the tree),
// ``to`` the node's own (-1: no child needs it).
struct Visit {
  int64_t node, from, to;
};

// Order of a row's nodes, and the inputs of each node's convolution: nodes, or entries of the state minus (width - 1).
struct Order {
  std::vector<Visit> visits;
  std::vector<int64_t> window;  // (nodes, taps), oldest first
  int64_t slots = 0, first = 0;

  void shape_prompt(int64_t nodes, int64_t width, int64_t first_token) {
    std::vector<int64_t> parent(nodes, -1);
    first = first_token;
    for (int64_t node = first; node < nodes; node++) {
      visits.push_back({node, node > first ? 0 : -1, 0});
      if (node > first) parent[node] = node - 1;
    }
    slots = 1, find_windows(parent, width);
  }

  void shape(const uint8_t* ancestors, int64_t nodes, int64_t width) {
    std::vector<int64_t> parent(nodes), child(nodes + 1, -1), next(nodes, -1), slot(nodes, -1);
    for (int64_t node = nodes - 1; node >= 0; node--) {
      int64_t above = node - 1;
      while (above >= 0 && !ancestors[node * nodes + above]) above--;
      parent[node] = above;
      int64_t& first = child[above < 0 ? nodes : above];
      next[node] = first, first = node;
    }
    for (int64_t node = child[nodes]; node >= 0;) {
      int64_t above = parent[node], from = above < 0 ? -1 : slot[above];
      if (child[node] >= 0) slot[node] = from < 0 ? 0 : from + (next[node] >= 0);
      slots = std::max(slots, slot[node] + 1);
      visits.push_back({node, from, slot[node]});
      if (child[node] >= 0) {
        node = child[node];
        continue;
      }
      while (node >= 0 && next[node] < 0) node = parent[node];
      if (node >= 0) node = next[node];
    }
    find_windows(parent, width);
  }

 private:
  void find_windows(const std::vector<int64_t>& parent, int64_t width) {
    window.resize(parent.size() * width);
    for (int64_t node = 0; node < int64_t(parent.size()); node++)
      for (int64_t tap = width - 1, at = node; tap >= 0; tap--) {
        window[node * width + tap] = at;
        at = at < 0 ? at - 1 : parent[at];
      }
  }
};

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }
inline float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

inline float dot_of(const float* a, const float* b, int64_t count) {
  floats total{};
  for (int64_t i = 0; i < count; i += LANES) total = fma(load<floats>(a + i), load<floats>(b + i), total);
  return sum(total);
}

// out = factor * x / |x|
inline void normalise(const float* x, int64_t count, float factor, float* out) {
  floats inverse = splat(factor / std::sqrt(dot_of(x, x, count) + 1e-6f));
  for (int64_t i = 0; i < count; i += LANES) store(out + i, load<floats>(x + i) * inverse);
}

// S = decay * S' + left (x) right, for ``width`` columns of a state with rows ``stride`` apart.
inline void update_state(const float* from, int64_t from_stride, float* to, int64_t to_stride, float decay,
                         const float* left, const float* right, int64_t count, int64_t width) {
  floats factor = splat(decay);
  for (int64_t i = 0; i < count; i++, from += from_stride, to += to_stride) {
    floats scaled = splat(left[i]);
    for (int64_t j = 0; j < width; j += LANES)
      store(to + j, fma(scaled, load<floats>(right + j), factor * load<floats>(from + j)));
  }
}

// Products of ``wide`` vectors of columns of a state with two rows of ``count`` factors, an even number.
template <int wide>
inline void read_columns(const float* state, int64_t stride, const float* key, const float* query, int64_t count,
                         floats* of_key, floats* of_query) {
  floats keys[2][wide] = {}, queries[2][wide] = {};
  for (int64_t i = 0; i < count; i += 2)
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++, state += stride) {
      floats k = splat(key[i + part]), q = splat(query[i + part]);
#pragma GCC unroll 4
      for (int j = 0; j < wide; j++) {
        floats s = load<floats>(state + j * LANES);
        keys[part][j] = fma(k, s, keys[part][j]), queries[part][j] = fma(q, s, queries[part][j]);
      }
    }
  for (int j = 0; j < wide; j++) of_key[j] = keys[0][j] + keys[1][j], of_query[j] = queries[0][j] + queries[1][j];
}

// Columns of Gated DeltaNet among the outputs of projections: parts of all heads one after the other, or, if
// interleaved, those of the heads of each group.
struct DeltaColumns {
  const Sublayer& layer;
  int64_t keys = layer.key_dim, values = layer.head_dim, shared = layer.heads / layer.groups, wide = shared * values;
  int64_t all_keys = layer.groups * keys, all_values = layer.heads * values, whole = 2 * (keys + wide);

  // Of a convolution's channel: queries, keys, values.
  int64_t channel(int64_t at) const {
    if (!layer.interleaved) return at;
    if (at < 2 * all_keys) return at % all_keys / keys * whole + at / all_keys * keys + at % keys;
    return (at - 2 * all_keys) / wide * whole + 2 * keys + (at - 2 * all_keys) % wide;
  }

  // Of the output gates of a head.
  int64_t gate(int64_t head) const {
    if (!layer.interleaved) return 2 * all_keys + all_values + head * values;
    return head / shared * whole + 2 * keys + wide + head % shared * values;
  }

  // Of the rate (0) or the step size (1) of a head.
  int64_t rate(int64_t head, int64_t part) const {
    int64_t place = layer.interleaved ? (head / shared * 2 + part) * shared + head % shared : part * layer.heads + head;
    return 2 * all_keys + 2 * all_values + place;
  }
};

// Per-thread buffers of a head.
struct HeadBuffers {
  Lines<float> slots;
  std::vector<float> normed, update;
  struct Gates {
    float rate, decay, overlap;
  };
  std::vector<Gates> gates;
};

// The scan of one head of a row: projected (rows, stride) and convolved (rows, channels) -> y (rows, heads * head_dim).
struct Scan {
  const Sublayer& layer;
  const Recurrent& r;
  const Order& order;
  const float *projected, *convolved;
  int64_t row, head, nodes, stride;
  float* y;
  HeadBuffers& buffers;
  int64_t keys = layer.key_dim, values = layer.head_dim, size = keys * values;
  int64_t all_keys = layer.groups * keys, all_values = layer.heads * values;
  int64_t group = head / (layer.heads / layer.groups);
  float* state = r.state + row * r.state_row + layer.place * r.unit + head * size;

  // Stores a node's key and decay among (groups, key_dim), (heads, head_dim) and (heads,) values.
  void record(int64_t node, const float* key, float decay) const {
    if (!r.record) return;
    float* to = recorded(node);
    if (head % (layer.heads / layer.groups) == 0) std::memcpy(to + group * keys, key, keys * sizeof(float));
    to[all_keys + all_values + head] = decay;
  }

  float* recorded(int64_t node) const {
    return r.record + ((row * r.nodes + node) * r.units + layer.place) * r.recorded;
  }

  // Calls node(index, row, before, stride, update, after) for all nodes; ``before`` and ``after`` are parts of ``size``
  // values of states, at ``first`` with rows ``stride`` apart before the tree, else contiguous. ``update`` is recorded;
  // ``after`` is null if no child needs it.
  template <class Node>
  void visit(int64_t first, int64_t part, int64_t stride, int64_t size, int64_t width, const Node& node) const {
    float* last = nullptr;
    for (const Visit& visit : order.visits) {
      const float* before = visit.from < 0 ? state + first : &buffers.slots[visit.from * size];
      float* update = r.record ? recorded(visit.node) + all_keys + head * values + part : buffers.update.data();
      last = visit.to < 0 ? nullptr : &buffers.slots[visit.to * size];
      node(visit.node, row * nodes + visit.node, before, visit.from < 0 ? stride : width, update, last);
    }
    if (!r.record && last)
      for (int64_t i = 0; i < size / width; i++)
        std::memcpy(state + first + i * stride, last + i * width, width * sizeof(float));
  }

  // Gated DeltaNet (arXiv 2412.06464): update = rate * (value - decay * S' key).
  void delta() const {
    buffers.normed.resize(nodes * 2 * keys), buffers.gates.resize(nodes);
    buffers.update.resize(COLUMNS), buffers.slots.reserve(order.slots * keys * COLUMNS);
    DeltaColumns columns{layer};
    for (const Visit& visit : order.visits) {
      int64_t at = row * nodes + visit.node;
      const float *mixed = convolved + at * layer.channels, *from = projected + at * stride;
      float *query = buffers.normed.data() + visit.node * 2 * keys, *key = query + keys;
      normalise(mixed + group * keys, keys, 1 / std::sqrt(float(keys)), query);
      normalise(mixed + all_keys + group * keys, keys, 1, key);
      float step = softplus(from[columns.rate(head, 1)] + layer.step_bias[head]);
      buffers.gates[visit.node] = {sigmoid(from[columns.rate(head, 0)]), std::exp(layer.decay[head] * step), dot_of(key, query, keys)};
      record(visit.node, key, buffers.gates[visit.node].decay);
    }
    int64_t column = 0;
    for (; column + COLUMNS <= values; column += COLUMNS) delta_columns<COLUMNS / LANES>(column);
    for (; column < values; column += LANES) delta_columns<1>(column);
    for (const Visit& visit : order.visits) {
      int64_t at = row * nodes + visit.node;
      const float* gate = projected + at * stride + columns.gate(head);
      float* out = y + (at * layer.heads + head) * values;
      norm_row(out, values, layer.inner_norm, layer.inner_epsilon, out);
      for (int64_t i = 0; i < values; i += LANES) store(out + i, load<floats>(out + i) * silu(load<floats>(gate + i)));
    }
  }

  // ``wide`` vectors of columns of the states at all nodes.
  template <int wide>
  void delta_columns(int64_t column) const {
    constexpr int64_t columns = wide * LANES;
    visit(column, column, values, keys * columns, columns,
          [&](int64_t node, int64_t at, const float* before, int64_t stride, float* update, float* after) {
            const float *query = buffers.normed.data() + node * 2 * keys, *key = query + keys;
            auto [rate, decay, overlap] = buffers.gates[node];
            floats of_key[wide], of_query[wide];
            read_columns<wide>(before, stride, key, query, keys, of_key, of_query);
            const float* value = convolved + at * layer.channels + 2 * all_keys + head * values + column;
            float* out = y + (at * layer.heads + head) * values + column;
            for (int64_t j = 0; j < wide; j++) {
              floats change = splat(rate) * (load<floats>(value + j * LANES) - splat(decay) * of_key[j]);
              store(update + j * LANES, change);
              store(out + j * LANES, fma(splat(overlap), change, splat(decay) * of_query[j]));
            }
            if (after) update_state(before, stride, after, columns, decay, key, update, keys, columns);
          });
  }

  // Mamba-2 (arXiv 2405.21060): update = step * x, key = B, query = C, output + D x.
  void mamba() const {
    buffers.gates.resize(nodes), buffers.update.resize(LANES), buffers.slots.reserve(order.slots * keys * LANES);
    auto key_of = [&](int64_t at) { return convolved + at * layer.channels + all_values + group * keys; };
    for (const Visit& visit : order.visits) {
      int64_t at = row * nodes + visit.node;
      float raw = projected[at * stride + 2 * all_values + 2 * all_keys + head] + layer.step_bias[head];
      float step = softplus(raw), decay = std::exp(layer.decay[head] * step);
      buffers.gates[visit.node] = {step, decay, dot_of(key_of(at), key_of(at) + all_keys, keys)};
      record(visit.node, key_of(at), decay);
    }
    for (int64_t value = 0; value < values; value += LANES)
      visit(value * keys, value, keys, LANES * keys, keys,
            [&](int64_t node, int64_t at, const float* before, int64_t, float* update, float* after) {
              const float *key = key_of(at), *query = key + all_keys;
              auto [step, decay, overlap] = buffers.gates[node];
              floats parts[LANES] = {};
              for (int64_t j = 0; j < keys; j += LANES) {
                floats q = load<floats>(query + j);
#pragma GCC unroll 16
                for (int64_t l = 0; l < LANES; l++) parts[l] = fma(q, load<floats>(before + l * keys + j), parts[l]);
              }
              floats input = load<floats>(convolved + at * layer.channels + head * values + value);
              floats change = splat(step) * input;
              store(update, change);
              floats read = fma(splat(overlap), change, splat(decay) * sums(parts));
              floats gate = load<floats>(projected + at * stride + head * values + value);
              store(y + (at * layer.heads + head) * values + value,
                    fma(splat(layer.skip[head]), input, read) * silu(gate));
              if (after) update_state(before, keys, after, keys, decay, update, key, LANES, keys);
            });
  }
};

// Attention to the nodes from ``first`` on, counted over all rows: several whole rows, or nodes of one.
inline Attention nodes_of(Attention a, int64_t first, int64_t count) {
  int64_t row = first / a.nodes, node = first % a.nodes, nodes = std::min(count, a.nodes);
  a.query += first * a.query_node, a.key += row * a.key_row, a.value += row * a.key_row;
  if (a.mask) a.mask += row * a.mask_row + node * a.mask_node;
  else a.slots -= a.nodes - node - nodes;
  a.batch = count / nodes, a.nodes = nodes;
  return a;
}

// Inputs of projections, and of output projections.
thread_local Rows inputs, hidden;

// A pass. ``inputs`` and ``hidden`` belong to the calling thread.
struct TreeDecoder {
  const TreePass& pass;
  int64_t batch = pass.attention.batch, nodes = pass.attention.nodes, rows = batch * nodes;
  Rows &inputs = ::inputs, &hidden = ::hidden;
  bool taken = false;  // ``inputs`` are the next projection's
  Lines<float> projected{}, convolved{}, mixed{}, added{};
  std::vector<Order> orders = std::vector<Order>(batch);

  // Calls body(first, count) for chunks of rows: whole rows of the batch, or nodes of one.
  template <class Body>
  void chunks(const Body& body) const {
    for (int64_t first = 0, count; first < rows; first += count) {
      count = nodes < CHUNK ? std::min(CHUNK / nodes * nodes, rows - first) : std::min(CHUNK, nodes - first % nodes);
      body(first, count);
    }
  }

  // Features between rows of projections; powers of two would map rows to the same cache lines.
  static int64_t stride_of(const Sublayer& layer) {
    int64_t total = LANES;
    for (int64_t i = 0; i < layer.projections; i++) total += (layer.inputs[i].out + LANES - 1) / LANES * LANES;
    return total;
  }

  // Converts a sublayer's inputs for one of its projections, unless those before it had the same.
  void take_inputs(const Sublayer& layer, int64_t projection, const float* from, int64_t count) {
    auto form = [](const Linear& of) { return of.kind == FLOAT32 ? 2 : of.kind == BFLOAT16 ? 1 : 0; };
    const Linear& linear = layer.inputs[projection];
    bool same = projection ? form(linear) == form(layer.inputs[projection - 1]) : taken;
    taken = false;
    if (same) return;
    if (!layer.norm) return take(linear, inputs, from, count);
    if (layer.parts == 1) return take_normed(linear, inputs, from, count, layer.norm, layer.epsilon);
    int64_t features = linear.in / layer.parts;
    added.reserve(count * linear.in);
    each(count * layer.parts, features, [&](int64_t i) {
      norm_row(from + i * features, features, layer.norm + i % layer.parts * features, layer.epsilon,
               &added[0] + i * features);
    });
    take(linear, inputs, &added[0], count);
  }

  // Norms and projections of all rows.
  void project(const Sublayer& layer, const float* x) {
    int64_t stride = stride_of(layer);
    projected.reserve(rows * stride);
    chunks([&](int64_t first, int64_t count) {
      int64_t column = 0;
      float* to = &projected[0] + first * stride;
      for (int64_t i = 0; i < layer.projections; i++) {
        const Linear& linear = layer.inputs[i];
        take_inputs(layer, i, x + first * linear.in, count);
        if (layer.kind == ATTENTION)
          project_heads(layer, linear, column, 0, first, count, to);
        else
          product(linear, inputs, count, to + column, nullptr, 1, stride);
        column += linear.out;
      }
      if (layer.output_scale && layer.kind != ATTENTION)
        each(count, column, [&](int64_t row) {
          for (int64_t i = 0; i < column; i++) to[row * stride + i] *= layer.output_scale[i];
        });
    });
  }

  // Heads of a projection to ``column``, from the head ``least`` on, see ``finish_head``.
  void project_heads(const Sublayer& layer, const Linear& linear, int64_t column, int64_t least, int64_t first,
                     int64_t count, float* to) {
    int64_t head_dim = layer.head_dim, blocks = head_dim / BLOCK, stride = stride_of(layer), before = column / head_dim;
    int64_t skipped = std::max<int64_t>(0, least - before), heads = linear.out / head_dim - skipped;
    if (heads <= 0) return;
    parts_of(heads, least_of(linear, head_dim), [&](int64_t begin, int64_t end) {
      Tiles tiles;
      begin += skipped, end += skipped;
      products(linear, begin * blocks, (end - begin) * blocks, {inputs, count, to + column, stride}, tiles);
      for (int64_t row = 0; row < count; row++)
        for (int64_t head = before + begin; head < before + end; head++)
          finish_head(layer, first + row, head, to + row * stride + head * head_dim);
    });
  }

  Attention attention_of(const Sublayer& layer) const {
    Attention a = pass.attention;
    a.heads = layer.heads, a.kv_heads = layer.groups, a.head_dim = layer.head_dim;
    return of_layer(a, layer.place);
  }

  // Norm and rotary positions of a head of a row, among queries (with a gate after each, if ``gated``), keys and values;
  // writes keys and values to the cache.
  void finish_head(const Sublayer& layer, int64_t row, int64_t head, float* values) const {
    int64_t head_dim = layer.head_dim, half = layer.rotated / 2, queries = layer.heads << layer.gated;
    int64_t turned = head < queries ? head >> layer.gated : head - queries + layer.heads;  // without gates
    if (head < queries && layer.gated && head % 2) return;
    if (layer.output_scale)
      for (int64_t i = 0; i < head_dim; i++) values[i] *= layer.output_scale[head * head_dim + i];
    if (turned < layer.heads + layer.groups) {
      const float *cosine = pass.rotation + (layer.rotation * rows + row) * 2 * half, *sine = cosine + half;
      if (layer.inner_norm)
        norm_row(values, head_dim, layer.inner_norm + turned * head_dim, layer.inner_epsilon, values);
      for (int64_t i = 0; i < half; i++) {
        float x = values[i], y = values[i + half];
        values[i] = x * cosine[i] - y * sine[i], values[i + half] = y * cosine[i] + x * sine[i];
      }
    }
    if (head >= queries)
      store_slot(attention_of(layer), turned < layer.heads + layer.groups, row, (head - queries) % layer.groups, values);
  }

  // to = before + scale * out(hidden), of a chunk. Also converts the inputs of the ``next`` sublayer, unless it is null.
  void add_outputs(const Sublayer& layer, int64_t first, int64_t count, const float* before, float* to,
                   const Sublayer* next) {
    int64_t features = pass.hidden;
    before += first * features, to += first * features;
    if (layer.after) {
      added.reserve(count * features);
      product(layer.out, hidden, count, &added[0]);
      return add(layer, count, before, to);
    }
    if (!next) return product(layer.out, hidden, count, to, before, layer.scale);
    product_then_norm(layer.out, hidden, count, to, before, layer.scale, next->inputs[0], inputs, next->norm,
                      next->epsilon);
    taken = true;
  }

  // to = before + scale * added, normed if the sublayer has a norm of outputs.
  void add(const Sublayer& layer, int64_t count, const float* before, float* to) {
    each(count, pass.hidden, [&](int64_t row) {
      int64_t begin = row * pass.hidden, end = begin + pass.hidden;
      float* from = &added[0];
      if (layer.after) norm_row(from + begin, pass.hidden, layer.after, layer.after_epsilon, from + begin);
      for (int64_t i = begin; i < end; i++) to[i] = before[i] + layer.scale * from[i];
    });
  }

  // ``add_outputs`` of a mixer.
  void add_mixed(const Sublayer& layer, const float* before, float* to, const Sublayer* next) {
    chunks([&](int64_t first, int64_t count) {
      take(layer.out, hidden, &mixed[0] + first * layer.out.in, count);
      add_outputs(layer, first, count, before, to, next);
    });
  }

  void attend(const Sublayer& layer, const float* before, float* to, const Sublayer* next) {
    int64_t stride = stride_of(layer), head_dim = layer.head_dim;
    Attention a = attention_of(layer);
    a.scale = layer.attention_scale, a.sinks = layer.sinks;
    if (layer.windowed && pass.window)
      a.mask = pass.window, a.mask_row = pass.window_row, a.mask_node = pass.window_node;
    a.query = &projected[0], a.query_row = nodes * stride, a.query_node = stride;
    a.query_head = head_dim << layer.gated;
    mixed.reserve(std::min(rows, CHUNK) * layer.out.in), a.read = &mixed[0];
    chunks([&](int64_t first, int64_t count) {
      attend_then_take(layer, nodes_of(a, first, count), &projected[0] + first * stride, stride);
      add_outputs(layer, first, count, before, to, next);
    });
  }

  // Attention, multiplied by the gates among ``projections``, as inputs of the output projection.
  void attend_then_take(const Sublayer& layer, const Attention& a, const float* projections, int64_t stride) {
    int64_t head_dim = layer.head_dim, in = layer.out.in;
    bool whole = layer.heads / layer.groups * head_dim % GROUP == 0;
    if (whole) hidden.shape(in, a.batch * a.nodes);
    attend_all(a, [&](int64_t first, int64_t nodes, int64_t feature, int64_t features) {
      for (int64_t row = first; row < first + nodes; row++) {
        float* read = a.read + row * in;
        for (int64_t i = feature; layer.gated && i < feature + features; i += LANES) {
          const float* gate = projections + row * stride + i + (i / head_dim + 1) * head_dim;
          store(read + i, times_sigmoid(load<floats>(read + i), load<floats>(gate)));
        }
        for (int64_t i = feature; whole && i < feature + features; i += GROUP)
          hidden.set(Kind(layer.out.kind), row, i / GROUP, read + i);
      }
    });
    if (!whole) take(layer.out, hidden, a.read, a.batch * a.nodes);
  }

  // Convolutions of all nodes, then SiLU if ``activated``; input(row, channel): the inputs of LANES channels.
  template <class Input>
  void convolve(const Sublayer& layer, bool activated, const Input& input) {
    const Recurrent& r = pass.recurrent;
    int64_t width = layer.width, before = width - 1, channels = layer.channels;
    convolved.reserve(rows * channels);
    each(batch * channels / LANES, 8 * nodes * width * LANES, [&](int64_t at) {
      int64_t row = at / (channels / LANES), channel = at % (channels / LANES) * LANES;
      float* state = r.conv_state + (row * r.channels + layer.first_channel + channel) * before;
      floats entries[WINDOW], taps[WINDOW];
      for (int64_t tap = 0; tap < width; tap++) taps[tap] = load<floats>(layer.taps + tap * channels + channel);
      for (int64_t entry = 0; entry < before; entry++)
        for (int64_t i = 0; i < LANES; i++) entries[entry][i] = state[i * before + entry];
      for (int64_t node = 0; node < nodes; node++) {
        const int64_t* window = orders[row].window.data() + node * width;
        floats sum = layer.tap_bias ? load<floats>(layer.tap_bias + channel) : floats{}, x{};
        for (int64_t tap = 0; tap < width; tap++) {
          x = window[tap] < 0 ? entries[before + window[tap]] : input(row * nodes + window[tap], channel);
          sum = fma(x, taps[tap], sum);
        }
        if (r.inputs) store(r.inputs + (row * nodes + node) * r.channels + layer.first_channel + channel, x);
        store(&convolved[0] + (row * nodes + node) * channels + channel, activated ? silu(sum) : sum);
      }
      for (int64_t entry = 0; !r.inputs && entry < before; entry++) {
        int64_t from = nodes - before + entry, first = orders[row].first;
        floats x = from < first ? entries[before + from - first] : input(row * nodes + from, channel);
        for (int64_t i = 0; i < LANES; i++) state[i * before + entry] = x[i];
      }
    });
  }

  void scan(const Sublayer& layer) {
    int64_t stride = stride_of(layer), values = layer.heads * layer.head_dim;
    mixed.reserve(rows * values);
    bool delta = layer.kind == GATED_DELTA;
    DeltaColumns columns{layer};
    convolve(layer, true, [&](int64_t row, int64_t channel) {
      int64_t column = delta ? columns.channel(channel) : values + channel;
      return load<floats>(&projected[0] + row * stride + column);
    });
    parts_of(batch * layer.heads, 1, [&](int64_t begin, int64_t end) {
      thread_local HeadBuffers buffers;
      for (int64_t at = begin; at < end; at++) {
        int64_t row = at / layer.heads, head = at % layer.heads;
        Scan one{layer, pass.recurrent, orders[row], &projected[0], &convolved[0],
                 row,   head,           nodes,       stride,           &mixed[0], buffers};
        delta ? one.delta() : one.mamba();
      }
    });
    if (delta || !layer.inner_norm) return;
    int64_t grouped = values / layer.norm_groups;
    each(rows * layer.norm_groups, grouped, [&](int64_t at) {
      norm_row(&mixed[0] + at * grouped, grouped, layer.inner_norm + at % layer.norm_groups * grouped,
               layer.inner_epsilon, &mixed[0] + at * grouped);
    });
  }

  // Gated short convolution (LFM2): C * conv(B * x), from projections B, C, x.
  void short_conv(const Sublayer& layer) {
    int64_t stride = stride_of(layer), channels = layer.channels;
    mixed.reserve(rows * channels);
    convolve(layer, false, [&](int64_t row, int64_t channel) {
      const float* x = &projected[0] + row * stride + channel;
      return load<floats>(x) * load<floats>(x + 2 * channels);
    });
    each(rows, channels, [&](int64_t row) {
      const float *gate = &projected[0] + row * stride + channels, *from = &convolved[0] + row * channels;
      for (int64_t c = 0; c < channels; c += LANES)
        store(&mixed[0] + row * channels + c, load<floats>(from + c) * load<floats>(gate + c));
    });
  }

  void mlp(const Sublayer& layer, const float* x, const float* before, float* to, const Sublayer* next) {
    chunks([&](int64_t first, int64_t count) {
      take_inputs(layer, 0, x + first * pass.hidden, count);
      gated_product(layer.inputs[0], inputs, count, {layer.activation, 0, 0, layer.gate_scale}, layer.out, hidden);
      add_outputs(layer, first, count, before, to, next);
    });
  }

  // added = outputs of the shared MLP, times the sigmoid of its gate.
  void add_shared(const Sublayer& layer, const float* x) {
    added.reserve(rows * pass.hidden), std::fill_n(&added[0], rows * pass.hidden, 0.0f);
    if (!layer.out.in) return;
    chunks([&](int64_t first, int64_t count) {
      float* to = &added[0] + first * pass.hidden;
      take_inputs(layer, 1, x + first * pass.hidden, count);
      gated_product(layer.inputs[1], inputs, count, {layer.activation, 0, 0, layer.gate_scale}, layer.out, hidden);
      product(layer.out, hidden, count, to);
      if (!layer.gated) return;
      take_inputs(layer, 2, x + first * pass.hidden, count);
      product(layer.inputs[2], inputs, count, &mixed[0]);
      each(count, pass.hidden, [&](int64_t row) {
        float gate = sigmoid(mixed[row]);
        for (int64_t i = row * pass.hidden; i < (row + 1) * pass.hidden; i++) to[i] *= gate;
      });
    });
  }

  void mixture(const Sublayer& layer, const float* x, const float* before, float* to) {
    int64_t used = layer.router->used, count = layer.experts->count;
    std::vector<int64_t> chosen(rows * used);
    std::vector<float> weights(rows * used);
    projected.reserve(rows * count), mixed.reserve(CHUNK);
    chunks([&](int64_t first, int64_t some) {
      take_inputs(layer, 0, x + first * pass.hidden, some);
      product(layer.inputs[0], inputs, some, &projected[0] + first * count);
    });
    choose_experts_of_rows(*layer.router, &projected[0], count, rows, chosen.data(), weights.data());
    add_shared(layer, x);
    add_experts(*layer.experts, {x, layer.norm, layer.epsilon}, rows, used, chosen.data(), weights.data(), &added[0]);
    add(layer, rows, before, to);
  }

  // The residual of inputs with several parts, or the normed input.
  void residual_of(const Sublayer& layer, const float* x, float* to) const {
    int64_t features = pass.hidden, skipped = (layer.parts - 1) * features;
    for (int64_t row = 0; row < rows; row++, to += features) {
      const float* from = x + row * layer.parts * features + skipped;
      if (layer.normed_residual)
        norm_row(from, features, layer.norm + skipped, layer.epsilon, to);
      else
        std::memcpy(to, from, features * sizeof(float));
    }
  }

  void order_nodes() {
    for (int64_t row = 0; pass.recurrent.channels && row < batch; row++)
      pass.ancestors ? orders[row].shape(pass.ancestors + row * nodes * nodes, nodes, pass.recurrent.width)
                     : orders[row].shape_prompt(nodes, pass.recurrent.width, pass.first ? pass.first[row] : 0);
  }

  void run() {
    order_nodes();
    const float *x = pass.x, *input = x, *before = x;
    float* to = pass.states;
    for (const Sublayer *layer = pass.sublayers, *end = layer + pass.count; layer < end; layer++) {
      const Sublayer* next = layer + 1 < end && rows <= CHUNK ? layer + 1 : nullptr;
      if (next && (next->beside || !next->norm)) next = nullptr;
      if (!layer->beside) input = x;
      before = x;
      if (layer->parts > 1 || layer->normed_residual) residual_of(*layer, x, to), before = to;
      if (layer->kind == MLP) {
        mlp(*layer, input, before, to, next);
      } else if (layer->kind == EXPERTS) {
        mixture(*layer, input, before, to);
      } else {
        project(*layer, input);
        if (layer->kind == ATTENTION) {
          attend(*layer, before, to, next);
        } else {
          layer->kind == SHORT_CONV ? short_conv(*layer) : scan(*layer);
          add_mixed(*layer, before, to, next);
        }
      }
      x = to;
      if (layer->ends_layer) to += rows * pass.hidden;
    }
  }

  // Writes the keys and values of all sublayers with attention for the inputs ``x``, which are not normed.
  void write_keys_values() {
    for (const Sublayer* layer = pass.sublayers; layer < pass.sublayers + pass.count; layer++) {
      if (layer->kind != ATTENTION) continue;
      projected.reserve(std::min(rows, CHUNK) * stride_of(*layer));
      chunks([&](int64_t first, int64_t count) {
        int64_t column = 0;
        for (const Linear* linear = layer->inputs; linear < layer->inputs + layer->projections; linear++) {
          take(*linear, inputs, pass.x + first * linear->in, count);
          project_heads(*layer, *linear, column, layer->heads << layer->gated, first, count, &projected[0]);
          column += linear->out;
        }
      });
    }
  }
};

// Advances the states of all recurrent layers along a path of each row.
void advance_rows(const Sublayer* sublayers, int64_t count, const Recurrent& r, const int64_t* path, int64_t batch,
                  int64_t depth) {
  struct Task {
    const Sublayer* layer;
    int64_t row, head;
  };
  std::vector<Task> tasks;
  for (const Sublayer* layer = sublayers; layer < sublayers + count; layer++)
    for (int64_t row = 0; row < batch; row++) {
      const int64_t* nodes = path + row * depth;
      int64_t length = std::find(nodes, nodes + depth, -1) - nodes, before = layer->width - 1;
      if (!layer->channels || !length) continue;
      float* state = r.conv_state + (row * r.channels + layer->first_channel) * before;
      for (int64_t c = 0; c < layer->channels; c++)
        for (int64_t tap = 0; tap < before; tap++) {
          int64_t at = length - before + tap;
          state[c * before + tap] = at < 0 ? state[c * before + tap + length]
                                           : r.inputs[(row * r.nodes + nodes[at]) * r.channels + layer->first_channel + c];
        }
      if (layer->kind != SHORT_CONV)
        for (int64_t head = 0; head < layer->heads; head++) tasks.push_back({layer, row, head});
    }
  parts_of(int64_t(tasks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at++) {
      auto [layer, row, head] = tasks[at];
      int64_t keys = layer->key_dim, values = layer->head_dim, group = head / (layer->heads / layer->groups);
      int64_t all_keys = layer->groups * keys, all_values = layer->heads * values;
      float* state = r.state + row * r.state_row + layer->place * r.unit + head * keys * values;
      for (const int64_t* node = path + row * depth; node < path + (row + 1) * depth && *node >= 0; node++) {
        const float* record = r.record + ((row * r.nodes + *node) * r.units + layer->place) * r.recorded;
        const float *key = record + group * keys, *update = record + all_keys + head * values;
        float decay = record[all_keys + all_values + head];
        if (layer->kind == GATED_DELTA)
          update_state(state, values, state, values, decay, key, update, keys, values);
        else
          update_state(state, keys, state, keys, decay, update, key, values, keys);
      }
    }
  });
}

}  // namespace
