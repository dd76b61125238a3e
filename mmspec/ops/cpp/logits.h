// Top-k and sampling of logits.

#pragma once

#include <vector>

#include "vectors.h"

namespace {

// Top-k values of a row and their indices, in descending order; ties are ordered by index.
void greatest_of(const float* row, int64_t count, int64_t k, float* best, int64_t* places) {
  int64_t found = 0;
  floats least = splat(-INFINITY);
  auto visit = [&](floats values, int64_t first) {
    for (uint32_t left = greater(values, least); left; left &= left - 1) {
      int lane = __builtin_ctz(left);
      if (found == k && !(values[lane] > best[k - 1])) continue;
      int64_t place = found < k ? found++ : k - 1;
      for (; place && best[place - 1] < values[lane]; place--)
        best[place] = best[place - 1], places[place] = places[place - 1];
      best[place] = values[lane], places[place] = first + lane;
      if (found == k) least = splat(best[k - 1]);
    }
  };
  int64_t whole = count - count % LANES, at = 0;
  for (; at + 4 * LANES <= whole; at += 4 * LANES) {  // rarely contains a value to insert
    floats a = load<floats>(row + at), b = load<floats>(row + at + LANES);
    floats c = load<floats>(row + at + 2 * LANES), d = load<floats>(row + at + 3 * LANES);
    floats ab = a > b ? a : b, cd = c > d ? c : d;
    if (greater(ab > cd ? ab : cd, least))
      visit(a, at), visit(b, at + LANES), visit(c, at + 2 * LANES), visit(d, at + 3 * LANES);
  }
  for (; at < whole; at += LANES) visit(load<floats>(row + at), at);
  floats rest = splat(-INFINITY);
  for (; at < count; at++) rest[at - whole] = row[at];
  visit(rest, whole);
  for (at = 0; at < count && found < k; at++)
    if (!(row[at] > -INFINITY)) best[found] = -INFINITY, places[found++] = at;
}

// exp(x - top) of LANES values from ``at`` on, 0 beyond the end and on underflow.
inline floats shares_at(const float* row, int64_t at, int64_t count, floats top) {
  floats values = splat(-INFINITY);
  if (count - at < LANES) {
    for (int64_t i = at; i < count; i++) values[i - at] = row[i];
  } else {
    values = load<floats>(row + at);
  }
  values -= top;
  return values < -87.0f ? floats{} : exponential(values);
}

// sum(exp(row - most))
inline float total_of(const float* row, int64_t count, float most) {
  floats total[4] = {}, top = splat(most);
  for (int64_t at = 0; at < count; at += LANES) total[at / LANES % 4] += shares_at(row, at, count, top);
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

// The token at which the cumulative distribution softmax(row) exceeds ``uniform``; the last possible one otherwise.
int64_t quantile_of(const float* row, int64_t count, double uniform) {
  constexpr int64_t STRETCH = 64 * LANES;
  int64_t top_at = 0, last = 0;
  float most;
  greatest_of(row, count, 1, &most, &top_at);
  std::vector<float> totals;
  double total = 0, before = 0;
  for (int64_t at = 0; at < count; at += STRETCH) {
    totals.push_back(total_of(row + at, std::min(STRETCH, count - at), most));
    total += totals.back();
  }
  double wanted = uniform * total;
  for (size_t i = 0; i < totals.size(); i++) {
    if (before + totals[i] <= wanted && i + 1 < totals.size()) {
      before += totals[i];
      continue;
    }
    for (int64_t first = i * STRETCH, at = first; at < count; at += LANES) {
      floats shares = shares_at(row, at, count, splat(most));
      for (int lane = 0; lane < LANES; lane++) {
        if (!(shares[lane] > 0)) continue;
        before += shares[lane], last = at + lane;
        if (before > wanted) return last;
      }
    }
  }
  return last;
}

}  // namespace
