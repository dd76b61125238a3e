// Routers of mixtures: the experts of a row and their weights, from the row's logits.

#pragma once

#include "logits.h"
#include "pool.h"

extern "C" {

struct Router {
  const float* correction;  // (count), added to scores for the choice alone; may be null
  int64_t count, used;
  int64_t sigmoid;     // scores are the logits' sigmoids instead of their softmax
  int64_t normalised;  // whether scores of a row's experts are divided by their sum plus ``epsilon``
  int64_t groups, used_groups;  // experts are chosen among those of some groups,
  int64_t group_best;           // which have the greatest sums of so many scores
  float epsilon, scale;         // of weights
};

}  // extern "C"

namespace {

struct Routing {
  std::vector<float> scores, best;
  std::vector<int64_t> places;

  // Replaces scores of groups that are not used by -infinity.
  void leave_groups(const Router& router) {
    int64_t size = router.count / router.groups, kept = std::min(router.group_best, size);
    std::vector<float> sums(router.groups);
    for (int64_t group = 0; group < router.groups; group++) {
      greatest_of(&scores[group * size], size, kept, best.data(), places.data());
      for (int64_t i = 0; i < kept; i++) sums[group] += best[i];
    }
    greatest_of(sums.data(), router.groups, router.used_groups, best.data(), places.data());
    for (int64_t group = 0; group < router.groups; group++)
      if (std::find(places.begin(), places.begin() + router.used_groups, group) == places.begin() + router.used_groups)
        std::fill_n(&scores[group * size], size, -INFINITY);
  }
};

// Chooses the experts of a row in descending order of their scores: chosen, weights (used).
inline void choose_experts(const Router& router, const float* logits, int64_t* chosen, float* weights) {
  thread_local Routing own;
  int64_t count = router.count, used = router.used;
  bool every = !router.sigmoid && !router.normalised, by_scores = router.correction || router.groups > 1;
  float most = *std::max_element(logits, logits + count);
  float all = every || (by_scores && !router.sigmoid) ? total_of(logits, count, most) : 1;
  auto score = [&](float logit) {
    return router.sigmoid ? 1 / (1 + std::exp(-logit)) : std::exp(logit - most) / all;
  };
  if (by_scores) {
    own.scores.resize(count), own.best.resize(count), own.places.resize(count);
    for (int64_t i = 0; i < count; i++) own.scores[i] = score(logits[i]) + (router.correction ? router.correction[i] : 0);
    if (router.groups > 1) own.leave_groups(router);
  }
  greatest_of(by_scores ? own.scores.data() : logits, count, used, weights, chosen);
  float total = router.normalised ? router.epsilon : 1;
  for (int64_t i = 0; i < used; i++) {
    weights[i] = score(logits[chosen[i]]);
    if (router.normalised) total += weights[i];
  }
  for (int64_t i = 0; i < used; i++) weights[i] = weights[i] / total * router.scale;
}

// Rows of logits are ``stride`` apart.
inline void choose_experts_of_rows(const Router& router, const float* logits, int64_t stride, int64_t rows,
                                   int64_t* chosen, float* weights) {
  each(rows, 8 * router.count, [&](int64_t row) {
    choose_experts(router, logits + row * stride, chosen + row * router.used, weights + row * router.used);
  });
}

}  // namespace
