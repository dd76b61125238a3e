// Decoders of residual sublayers, x += scale * f(RMSNorm(x)): attention, recurrent mixers, short convolutions, MLPs and
// mixtures of experts.
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
  const float* norm;
  const float* inner_norm;  // attention: (heads + groups, head_dim); mixers: gain of the gated norm
  const float* output_scale;               // of the projections' outputs, (outputs)
  const float *taps, *tap_bias;            // convolution: (width, channels), (channels)
  const float *decay, *step_bias, *skip;   // (heads)
  float epsilon, inner_epsilon, scale, attention_scale;
  int64_t kind, projections;
  int64_t ends_layer, beside;                    // whether the output is a layer's; whether the input is that of the
                                                 // sublayer before it
  int64_t heads, groups, head_dim, key_dim;      // groups: heads of keys
  int64_t rotated, gated;                        // attention: rotated features of a head; whether outputs have gates
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
  const float *x, *rotation;  // rotation: (batch * nodes, 2, rotated / 2), cosines and sines
  float* states;              // (layers, batch * nodes, hidden)
  const uint8_t* ancestors;   // (batch, nodes, nodes); null for a prompt
  const int64_t* first;       // (batch): first token of each row of a prompt, after padding; null: 0
  Attention attention;  // of the first layer with keys and values
  Recurrent recurrent;
};

}  // extern "C"

namespace {

enum Mixing : int64_t { ATTENTION, GATED_DELTA, MAMBA2, SHORT_CONV, MLP, EXPERTS };
enum Activation : int64_t { SILU, GELU, SQUARED_RELU };

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
    for (const Visit& visit : order.visits) {
      int64_t at = row * nodes + visit.node;
      const float *mixed = convolved + at * layer.channels, *gates = projected + at * stride + 2 * all_keys + 2 * all_values;
      float *query = buffers.normed.data() + visit.node * 2 * keys, *key = query + keys;
      normalise(mixed + group * keys, keys, 1 / std::sqrt(float(keys)), query);
      normalise(mixed + all_keys + group * keys, keys, 1, key);
      float step = softplus(gates[layer.heads + head] + layer.step_bias[head]);
      buffers.gates[visit.node] = {sigmoid(gates[head]), std::exp(layer.decay[head] * step), dot_of(key, query, keys)};
      record(visit.node, key, buffers.gates[visit.node].decay);
    }
    int64_t column = 0;
    for (; column + COLUMNS <= values; column += COLUMNS) delta_columns<COLUMNS / LANES>(column);
    for (; column < values; column += LANES) delta_columns<1>(column);
    for (const Visit& visit : order.visits) {
      int64_t at = row * nodes + visit.node;
      const float* gate = projected + at * stride + 2 * all_keys + all_values + head * values;
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

// Inputs and buffers of one pass.
struct TreeDecoder {
  const TreePass& pass;
  int64_t batch, nodes, rows;
  std::vector<Order> orders;
  std::vector<float> projected, convolved, mixed, added;

  explicit TreeDecoder(const TreePass& of)
      : pass(of), batch(of.attention.batch), nodes(of.attention.nodes), rows(batch * nodes), orders(batch) {
    int64_t widest = 0, inner = 0, channels = 0;
    for (const Sublayer* layer = pass.sublayers; layer < pass.sublayers + pass.count; layer++) {
      widest = std::max(widest, stride_of(*layer)), inner = std::max(inner, layer->out.in);
      channels = std::max(channels, layer->channels);
    }
    projected.resize(rows * widest), convolved.resize(rows * channels), mixed.resize(rows * inner), added.resize(rows * pass.hidden);
    for (int64_t row = 0; channels && row < batch; row++)
      pass.ancestors ? orders[row].shape(pass.ancestors + row * nodes * nodes, nodes, pass.recurrent.width)
                     : orders[row].shape_prompt(nodes, pass.recurrent.width, pass.first ? pass.first[row] : 0);
  }

  // Features between rows of projections; powers of two would map rows to the same cache lines.
  static int64_t stride_of(const Sublayer& layer) {
    int64_t total = LANES;
    for (int64_t i = 0; i < layer.projections; i++) total += (layer.inputs[i].out + LANES - 1) / LANES * LANES;
    return total;
  }

  static bool same_inputs(const Linear& a, const Linear& b) {
    auto form = [](const Linear& of) { return of.kind == FLOAT32 ? 2 : of.kind == BFLOAT16 ? 1 : 0; };
    return form(a) == form(b);
  }

  // RMSNorm and projections of all rows.
  void project(const Sublayer& layer, const float* x, Rows& operand) {
    int64_t stride = stride_of(layer);
    for (int64_t first = 0; first < rows; first += CHUNK) {
      int64_t count = std::min(CHUNK, rows - first), column = 0;
      for (int64_t i = 0; i < layer.projections; i++) {
        const Linear& linear = layer.inputs[i];
        if (i == 0 || !same_inputs(layer.inputs[i - 1], linear))
          take_normed(linear, operand, x + first * pass.hidden, count, layer.norm, layer.epsilon);
        product(linear, operand, count, projected.data() + first * stride + column, nullptr, stride);
        column += linear.out;
      }
      if (layer.output_scale)
        each(count, column, [&](int64_t row) {
          for (int64_t i = 0; i < column; i++) projected[(first + row) * stride + i] *= layer.output_scale[i];
        });
    }
  }

  // to = x + scale * out(from)
  void add_outputs(const Sublayer& layer, const float* from, const float* x, float* to, Rows& operand) {
    for (int64_t first = 0; first < rows; first += CHUNK) {
      int64_t count = std::min(CHUNK, rows - first);
      take(layer.out, operand, from + first * layer.out.in, count);
      add_product(layer, operand, first, count, x, to);
    }
  }

  void add_product(const Sublayer& layer, const Rows& operand, int64_t first, int64_t count, const float* x, float* to) {
    int64_t at = first * pass.hidden, end = (first + count) * pass.hidden;
    if (layer.scale == 1) return product(layer.out, operand, count, to + at, x + at);
    product(layer.out, operand, count, added.data() + at);
    for (int64_t i = at; i < end; i++) to[i] = x[i] + layer.scale * added[i];
  }

  void attend(const Sublayer& layer, float* read) {
    int64_t stride = stride_of(layer), head_dim = layer.head_dim, half = layer.rotated / 2;
    int64_t queries = layer.heads * head_dim, keys = layer.groups * head_dim, each_query = head_dim << layer.gated;
    Attention a = pass.attention;
    a.heads = layer.heads, a.kv_heads = layer.groups, a.head_dim = head_dim, a.scale = layer.attention_scale;
    a = of_layer(a, layer.place);
    each(rows, stride, [&](int64_t row) {
      float *from = projected.data() + row * stride, *key = from + (queries << layer.gated);
      const float *cosine = pass.rotation + row * 2 * half, *sine = cosine + half;
      auto turn = [&](float* head, const float* norm) {
        if (norm) norm_row(head, head_dim, norm, layer.inner_epsilon, head);
        for (int64_t i = 0; i < half; i++) {
          float x = head[i], y = head[i + half];
          head[i] = x * cosine[i] - y * sine[i], head[i + half] = y * cosine[i] + x * sine[i];
        }
      };
      for (int64_t head = 0; head < layer.heads + layer.groups; head++) {
        bool is_key = head >= layer.heads;
        turn(is_key ? key + (head - layer.heads) * head_dim : from + head * each_query,
             layer.inner_norm ? layer.inner_norm + head * head_dim : nullptr);
      }
      for (int part = 0; part < 2; part++)
        for (int64_t head = 0; head < layer.groups; head++)
          store_slot(a, !part, row, head, key + part * keys + head * head_dim);
      if (layer.gated)
        for (int64_t head = 0; head < layer.heads; head++)
          std::memcpy(mixed.data() + row * queries + head * head_dim, from + head * each_query,
                      head_dim * sizeof(float));
    });
    int64_t query_stride = layer.gated ? queries : stride;
    a.query = layer.gated ? mixed.data() : projected.data();
    a.query_row = nodes * query_stride, a.query_node = query_stride;
    a.read = read;
    attend_all(a);
    if (layer.gated)
      each(rows, queries, [&](int64_t row) {
        for (int64_t head = 0; head < layer.heads; head++) {
          const float* gate = projected.data() + row * stride + head * each_query + head_dim;
          float* out = read + row * queries + head * head_dim;
          for (int64_t i = 0; i < head_dim; i += LANES)
            store(out + i, times_sigmoid(load<floats>(out + i), load<floats>(gate + i)));
        }
      });
  }

  // Convolutions of all nodes, then SiLU if ``activated``; input(row, channel): the inputs of LANES channels.
  template <class Input>
  void convolve(const Sublayer& layer, bool activated, const Input& input) {
    const Recurrent& r = pass.recurrent;
    int64_t width = layer.width, before = width - 1, channels = layer.channels;
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
        store(convolved.data() + (row * nodes + node) * channels + channel, activated ? silu(sum) : sum);
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
    bool delta = layer.kind == GATED_DELTA;
    const float* first = projected.data() + (delta ? 0 : values);
    convolve(layer, true, [&](int64_t row, int64_t channel) { return load<floats>(first + row * stride + channel); });
    parts_of(batch * layer.heads, 1, [&](int64_t begin, int64_t end) {
      thread_local HeadBuffers buffers;
      for (int64_t at = begin; at < end; at++) {
        int64_t row = at / layer.heads, head = at % layer.heads;
        Scan one{layer, pass.recurrent, orders[row], projected.data(), convolved.data(),
                 row,   head,           nodes,       stride,           mixed.data(), buffers};
        delta ? one.delta() : one.mamba();
      }
    });
    if (delta || !layer.inner_norm) return;
    int64_t grouped = values / layer.norm_groups;
    each(rows * layer.norm_groups, grouped, [&](int64_t at) {
      norm_row(mixed.data() + at * grouped, grouped, layer.inner_norm + at % layer.norm_groups * grouped,
               layer.inner_epsilon, mixed.data() + at * grouped);
    });
  }

  // Gated short convolution (LFM2): C * conv(B * x), from projections B, C, x.
  void short_conv(const Sublayer& layer) {
    int64_t stride = stride_of(layer), channels = layer.channels;
    convolve(layer, false, [&](int64_t row, int64_t channel) {
      const float* x = projected.data() + row * stride + channel;
      return load<floats>(x) * load<floats>(x + 2 * channels);
    });
    each(rows, channels, [&](int64_t row) {
      const float *gate = projected.data() + row * stride + channels, *from = convolved.data() + row * channels;
      for (int64_t c = 0; c < channels; c += LANES)
        store(mixed.data() + row * channels + c, load<floats>(from + c) * load<floats>(gate + c));
    });
  }

  void mlp(const Sublayer& layer, const float* x, float* to, Rows& operand) {
    int64_t stride = stride_of(layer);
    for (int64_t first = 0; first < rows; first += CHUNK) {
      int64_t count = std::min(CHUNK, rows - first);
      float* from = projected.data() + first * stride;
      if (layer.activation != SQUARED_RELU) {
        take_gated(layer.out, operand, from, stride, count, {layer.activation == GELU});
      } else {
        each(count, layer.out.in, [&](int64_t row) {
          for (int64_t i = 0; i < layer.out.in; i += LANES) {
            floats z = load<floats>(from + row * stride + i), positive = z > 0 ? z : floats{};
            store(mixed.data() + row * layer.out.in + i, positive * positive);
          }
        });
        take(layer.out, operand, mixed.data(), count);
      }
      add_product(layer, operand, first, count, x, to);
    }
  }

  // added = outputs of the shared MLP, times the sigmoid of its gate.
  void add_shared(const Sublayer& layer, Rows& operand) {
    int64_t stride = stride_of(layer), column = layer.experts->count, hidden = pass.hidden;
    if (!layer.out.in) return std::fill(added.begin(), added.end(), 0.0f);
    for (int64_t first = 0; first < rows; first += CHUNK) {
      int64_t count = std::min(CHUNK, rows - first);
      const float* from = projected.data() + first * stride + column;
      take_gated(layer.out, operand, from, stride, count, {layer.activation == GELU});
      product(layer.out, operand, count, added.data() + first * hidden);
    }
    for (int64_t row = 0; layer.gated && row < rows; row++) {
      float gate = sigmoid(projected[row * stride + column + 2 * layer.out.in]);
      for (int64_t i = row * hidden; i < (row + 1) * hidden; i++) added[i] *= gate;
    }
  }

  void mixture(const Sublayer& layer, const float* x, float* to, Rows& operand) {
    int64_t used = layer.router->used;
    std::vector<int64_t> chosen(rows * used);
    std::vector<float> weights(rows * used);
    choose_experts_of_rows(*layer.router, projected.data(), stride_of(layer), rows, chosen.data(), weights.data());
    add_shared(layer, operand);
    add_experts(*layer.experts, {x, layer.norm, layer.epsilon}, rows, used, chosen.data(), weights.data(), added.data());
    for (int64_t i = 0; i < rows * pass.hidden; i++) to[i] = x[i] + layer.scale * added[i];
  }

  void run(Rows& operand) {
    const float *x = pass.x, *input = x;
    float* to = pass.states;
    for (const Sublayer* layer = pass.sublayers; layer < pass.sublayers + pass.count; layer++) {
      if (!layer->beside) input = x;
      project(*layer, input, operand);
      if (layer->kind == MLP) {
        mlp(*layer, x, to, operand);
      } else if (layer->kind == EXPERTS) {
        mixture(*layer, x, to, operand);
      } else {
        if (layer->kind == ATTENTION) {
          std::vector<float> read(rows * layer->out.in);
          attend(*layer, read.data());
          add_outputs(*layer, read.data(), x, to, operand);
        } else {
          layer->kind == SHORT_CONV ? short_conv(*layer) : scan(*layer);
          add_outputs(*layer, mixed.data(), x, to, operand);
        }
      }
      x = to;
      if (layer->ends_layer) to += rows * pass.hidden;
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
