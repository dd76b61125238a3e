// Draft trees over slots that one pass has predicted.

#pragma once

#include <numeric>
#include <vector>

#include "logits.h"
#include "products.h"

extern "C" {

// How the token before corrects the logits of a slot (DSpark's Markov head, arXiv 2607.05147).
struct Markov {
  Linear out;          // from a token's embedding to the draft vocabulary
  const float* table;  // (tokens, out.in), embeddings of the target's tokens; further tokens have that of token 0
  int64_t tokens;
  const int64_t* draft_ids;  // (out.out): the target's tokens; null: the same ones
};

}  // extern "C"

namespace {

struct Candidates {
  std::vector<int64_t> tokens, parents;  // parent 0 is the root, i the i-th candidate
  std::vector<float> scores;             // log probabilities of paths

  // The best of those from ``first`` on, in descending order, equal ones in their own.
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
};

struct SlotScratch {
  Rows operand;
  std::vector<float> embeds, logits, best;
  std::vector<int64_t> places;
};

// Logits of a slot after each of some tokens.
void corrected_logits(const Markov& markov, const float* slot, const std::vector<int64_t>& before,
                      SlotScratch& scratch) {
  int64_t rank = markov.out.in, vocab = markov.out.out, rows = before.size();
  scratch.embeds.resize(rows * rank), scratch.logits.resize(rows * vocab);
  for (int64_t row = 0; row < rows; row++) {
    int64_t token = before[row] < markov.tokens ? before[row] : 0;
    std::memcpy(scratch.embeds.data() + row * rank, markov.table + token * rank, rank * sizeof(float));
    std::memcpy(scratch.logits.data() + row * vocab, slot, vocab * sizeof(float));
  }
  scratch.operand.shape(rank);
  take(markov.out, scratch.operand, scratch.embeds.data(), rows);
  product(markov.out, scratch.operand, rows, scratch.logits.data(), scratch.logits.data());
}

// Candidates of a tree: in each level, ``width`` children of the ``width`` best nodes of the level before.
Candidates slot_candidates(const Markov& markov, const float* logits, int64_t slots, int64_t last, int64_t width,
                           SlotScratch& scratch) {
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
      greatest_of(after, vocab, k, scratch.best.data(), scratch.places.data());
      float most = scratch.best[0], total = most + std::log(total_of(after, vocab, most));
      for (int64_t i = 0; i < k; i++) {
        int64_t token = scratch.places[i];
        found.tokens.push_back(markov.draft_ids ? markov.draft_ids[token] : token);
        found.parents.push_back(level ? beam[row] + 1 : 0);
        found.scores.push_back(scores[row] + (scratch.best[i] - total));
      }
    }
    beam = found.best(first, width);
    before.clear(), scores.clear();
    for (int64_t node : beam) before.push_back(found.tokens[node]), scores.push_back(found.scores[node]);
  }
  return found;
}

}  // namespace
