// Draft trees without a forward pass per level: over slots predicted in one pass, or with a recurrent cell.

#pragma once

#include <numeric>
#include <vector>

#include "logits.h"
#include "products.h"

extern "C" {

// DSpark's Markov head (arXiv 2607.05147), which corrects the logits of a slot given the previous token.
struct Markov {
  Linear out;          // from a token's embedding to the draft vocabulary
  const float* table;  // (tokens, out.in), embeddings of target tokens; tokens outside the table use row 0
  int64_t tokens;
  const int64_t* draft_ids;  // (out.out): target token of each draft token; null: identity
};

// Recurrent drafting cell: layers over a carried state, per-token input table, and LayerNorm.
struct Cell {
  Linear into, out, guess, head;  // logits are head(guess(state))
  const float *table, *norm, *norm_bias;  // (tokens, into.out): product with the token's embedding, plus bias
  float epsilon;
};

}  // extern "C"

namespace {

struct Candidates {
  std::vector<int64_t> tokens, parents;  // parent 0 is the root, i the i-th candidate
  std::vector<float> scores;             // log probabilities of paths

  void add(int64_t token, int64_t parent, float score) {
    tokens.push_back(token), parents.push_back(parent), scores.push_back(score);
  }

  // The best candidates from ``first`` on, in descending order; ties keep their order.
  std::vector<int64_t> best(int64_t first, int64_t count) const {
    std::vector<int64_t> order(scores.size() - first);
    std::iota(order.begin(), order.end(), first);
    count = std::min(count, int64_t(order.size()));
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [this](int64_t a, int64_t b) {
      return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
    });
    order.resize(count);
    return order;
  }

  // Whether ``count`` candidates are at least as probable as candidate ``other``, which excludes its descendants from
  // the best.
  bool complete(int64_t count, int64_t other) const {
    auto as_probable = [least = scores[other]](float score) { return score >= least; };
    return std::count_if(scores.begin(), scores.end(), as_probable) >= count;
  }
};

// The k most probable children of a node and their log probabilities.
void children_of(const float* logits, int64_t vocab, int64_t k, float* scores, int64_t* tokens) {
  greatest_of(logits, vocab, k, scores, tokens);
  float total = scores[0] + std::log(total_of(logits, vocab, scores[0]));
  for (int64_t i = 0; i < k; i++) scores[i] -= total;
}

// Writes the tree of the best candidates: ``nodes`` tokens, starting with ``last``, their parents, -1 for the first,
// and log probabilities, in descending order. ``ids`` maps draft to target tokens; null: identity.
void write_tree(const Candidates& found, int64_t last, int64_t nodes, const int64_t* ids, int64_t* tokens,
                int64_t* parents, float* log_probs) {
  std::vector<int64_t> order = found.best(0, nodes - 1), place(found.scores.size() + 1);
  tokens[0] = last, parents[0] = -1, log_probs[0] = 0;
  for (size_t at = 1; at <= order.size(); at++) {
    int64_t from = order[at - 1], token = found.tokens[from];
    place[from + 1] = at;
    tokens[at] = ids ? ids[token] : token, log_probs[at] = found.scores[from], parents[at] = place[found.parents[from]];
  }
}

struct SlotScratch {
  Rows operand;
  std::vector<float> embeds, logits, best;
  std::vector<int64_t> places;
};

// Logits of a slot after each of several tokens.
void corrected_logits(const Markov& markov, const float* slot, const std::vector<int64_t>& before,
                      SlotScratch& scratch) {
  int64_t rank = markov.out.in, vocab = markov.out.out, rows = before.size();
  scratch.embeds.resize(rows * rank), scratch.logits.resize(rows * vocab);
  for (int64_t row = 0; row < rows; row++) {
    int64_t token = before[row] < markov.tokens ? before[row] : 0;
    std::memcpy(scratch.embeds.data() + row * rank, markov.table + token * rank, rank * sizeof(float));
    std::memcpy(scratch.logits.data() + row * vocab, slot, vocab * sizeof(float));
  }
  take(markov.out, scratch.operand, scratch.embeds.data(), rows);
  product(markov.out, scratch.operand, rows, scratch.logits.data(), scratch.logits.data());
}

// Candidates of a tree: in each level, ``width`` children of the ``width`` best nodes of the previous level, while any
// of these may be among the best ``kept``.
Candidates slot_candidates(const Markov& markov, const float* logits, int64_t slots, int64_t last, int64_t width,
                           int64_t kept, SlotScratch& scratch) {
  Candidates found;
  int64_t vocab = markov.out.out, k = std::min(width, vocab);
  std::vector<int64_t> before{last}, beam;
  std::vector<float> scores{0};
  scratch.best.resize(k), scratch.places.resize(k);
  for (int64_t level = 0; level < slots; level++) {
    int64_t first = found.scores.size();
    corrected_logits(markov, logits + level * vocab, before, scratch);
    for (size_t row = 0; row < before.size(); row++) {
      const float* after = scratch.logits.data() + row * vocab;
      children_of(after, vocab, k, scratch.best.data(), scratch.places.data());
      for (int64_t i = 0; i < k; i++) {
        int64_t token = scratch.places[i], above = level ? beam[row] + 1 : 0;
        found.add(markov.draft_ids ? markov.draft_ids[token] : token, above, scores[row] + scratch.best[i]);
      }
    }
    beam = found.best(first, width);
    if (found.complete(kept, beam[0])) break;
    before.clear(), scores.clear();
    for (int64_t node : beam) before.push_back(found.tokens[node]), scores.push_back(found.scores[node]);
  }
  return found;
}

// LayerNorm of a row; ``features`` is a multiple of LANES.
void centre(float* row, int64_t features, const float* weight, const float* bias, float epsilon) {
  floats total{}, square{};
  for (int64_t i = 0; i < features; i += LANES) total += load<floats>(row + i);
  floats mean = splat(sum(total) / float(features));
  for (int64_t i = 0; i < features; i += LANES) {
    floats x = load<floats>(row + i) - mean;
    square = fma(x, x, square);
  }
  floats factor = splat(1 / std::sqrt(sum(square) / float(features) + epsilon));
  for (int64_t i = 0; i < features; i += LANES)
    store(row + i, fma((load<floats>(row + i) - mean) * factor, load<floats>(weight + i), load<floats>(bias + i)));
}

struct CellScratch {
  Rows operand, gated;
  std::vector<float> between, guesses, carried, scores;
  std::vector<int64_t> origin, tokens, children;
};

// Runs a tree level: from the tokens of a beam and the states that predicted them, (batch, wide, hidden), computes the
// new states and the k best children of each token.
void cell_level(const Cell& cell, CellScratch& s, int64_t wide, int64_t beam, int64_t k, int threads) {
  const Linear &into = cell.into, &out = cell.out, &guess = cell.guess, &head = cell.head;
  int64_t width = out.out, rows = s.tokens.size(), widest = std::max(into.out, head.out);
  std::vector<float> before = std::move(s.carried);
  s.carried.resize(rows * width), s.scores.resize(rows * k), s.children.resize(rows * k);
  s.between.resize(std::min(CHUNK, rows) * widest), s.guesses.resize(std::min(CHUNK, rows) * guess.out);
  Team team(threads);
  for (int64_t first = 0; first < rows; first += CHUNK) {
    int64_t count = std::min(CHUNK, rows - first);
    float *state = s.carried.data() + first * width, *read = s.between.data();
    each(count, width + into.out, [&](int64_t row) {
      int64_t from = (first + row) / beam * wide + s.origin[first + row];
      std::memcpy(state + row * width, before.data() + from * width, width * sizeof(float));
      std::memcpy(read + row * into.out, cell.table + s.tokens[first + row] * into.out, into.out * sizeof(float));
    });
    take(into, s.operand, state, count);
    product(into, s.operand, count, read, read);
    each(count, 4 * into.out, [&](int64_t row) {
      for (int64_t i = row * into.out; i < (row + 1) * into.out; i += LANES)
        store(read + i, silu(load<floats>(read + i)));
    });
    take(out, s.gated, read, count);
    product(out, s.gated, count, state, state);
    each(count, width, [&](int64_t row) {
      centre(state + row * width, width, cell.norm, cell.norm_bias, cell.epsilon);
    });
    take(guess, s.operand, state, count);
    product(guess, s.operand, count, s.guesses.data());
    take(head, s.operand, s.guesses.data(), count);
    product(head, s.operand, count, read);
    each(count, head.out, [&](int64_t row) {
      int64_t at = (first + row) * k;
      children_of(read + row * head.out, head.out, k, s.scores.data() + at, s.children.data() + at);
    });
  }
}

// Adds candidates to trees with first levels (batch, k) in ``s``, to select the best ``kept``; returns the levels.
int64_t cell_candidates(const Cell& cell, CellScratch& s, std::vector<Candidates>& trees, int64_t width,
                        int64_t levels, float least, int64_t kept, int threads) {
  int64_t batch = trees.size(), k = s.children.size() / batch, begin = 0, wide = 1, beam = 1, level = 1;
  std::vector<std::vector<int64_t>> beams(batch);
  for (int64_t row = 0; row < batch; row++)
    for (int64_t i = 0; i < k; i++) trees[row].add(s.children[row * k + i], 0, s.scores[row * k + i]);
  for (; level < levels; level++, wide = beam) {
    float expected = 0;
    bool complete = true;
    s.tokens.clear(), s.origin.clear();
    for (int64_t row = 0; row < batch; row++) {
      beams[row] = trees[row].best(begin, width);
      complete = complete && trees[row].complete(kept, beams[row][0]);
      for (int64_t node : beams[row]) {
        s.tokens.push_back(trees[row].tokens[node]), s.origin.push_back((node - begin) / k);
        expected += std::exp(trees[row].scores[node]);
      }
    }
    if (complete || expected / float(batch) <= least) break;
    beam = beams[0].size(), begin = trees[0].scores.size();
    k = std::min(width, cell.head.out);
    cell_level(cell, s, wide, beam, k, threads);
    for (int64_t row = 0; row < batch; row++)
      for (int64_t i = 0; i < beam * k; i++) {
        int64_t above = beams[row][i / k], at = row * beam * k + i;
        trees[row].add(s.children[at], above + 1, trees[row].scores[above] + s.scores[at]);
      }
  }
  return level;
}

}  // namespace

extern "C" {

// Trees of the best candidates over slots, (batch, nodes), see write_tree. logits: (batch, slots, draft tokens)
void draft_slots(const Markov* markov, const float* logits, const int64_t* last, int64_t batch, int64_t slots,
                 int64_t width, int64_t nodes, int64_t* tokens, int64_t* parents, float* log_probs) {
  SlotScratch scratch;
  for (int64_t row = 0; row < batch; row++) {
    const float* own = logits + row * slots * markov->out.out;
    Candidates found = slot_candidates(*markov, own, slots, last[row], width, nodes - 1, scratch);
    int64_t at = row * nodes;
    write_tree(found, last[row], nodes, nullptr, tokens + at, parents + at, log_probs + at);
  }
}

// Trees of the best candidates of a cell, (batch, nodes), see write_tree; rows may have fewer than ``nodes`` nodes.
// Levels are added while a token of the next level is reached with a probability above ``least`` and may be among the
// best; returns their number. carried: (batch, hidden); children, scores: (batch, k), the first levels; ids: target
// tokens, or null.
int64_t draft_cells(const Cell* cell, const float* carried, const int64_t* children, const float* scores,
                    const int64_t* last, const int64_t* ids, int64_t batch, int64_t k, int64_t width, int64_t levels,
                    float least, int64_t nodes, int64_t* tokens, int64_t* parents, float* log_probs, int threads) {
  static thread_local CellScratch s;
  s.carried.assign(carried, carried + batch * cell->out.out);
  s.children.assign(children, children + batch * k), s.scores.assign(scores, scores + batch * k);
  std::vector<Candidates> trees(batch);
  int64_t grown = cell_candidates(*cell, s, trees, width, levels, least, nodes - 1, threads);
  for (int64_t row = 0, at = 0; row < batch; row++, at += nodes)
    write_tree(trees[row], last[row], nodes, ids, tokens + at, parents + at, log_probs + at);
  return grown;
}

}  // extern "C"
