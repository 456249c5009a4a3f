// A filter keeps a head of the tokens in the order "higher logit first, then lower id". The row is counted into bins by logit; only
// the bin in which the head ends is sorted. Bins follow the logits' order exactly, so the head is the one that a full sort finds.
#include "filter.h"

#include <algorithm>
#include <cmath>

#include "rows.h"

namespace {

constexpr int32_t BINS = 4096;
constexpr size_t SORTED_AT_FIRST = 256;

bool comes_first(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.token < b.token; }

void drop_light(float* weights, int64_t width, float least) {
  const V floor = set1(least), nothing = zero();
  each_vector(width, [&](int64_t i, int n) {
    const V w = get(weights + i, n);
    put(weights + i, where_less(w, floor, nothing, w), n);
  });
}

// Bins of the tokens that have weight, 0 for the highest logits; the others get a bin that nobody reads.
void fill_bins(const float* logits, const float* weights, int64_t width, FilterMemory& memory) {
  float highest = -INFINITY, lowest = INFINITY;
  for (int64_t i = 0; i < width; ++i) {
    const float logit = logits[i];
    highest = weights[i] > 0.0f && logit > highest ? logit : highest;
    lowest = weights[i] > 0.0f && logit < lowest ? logit : lowest;
  }
  const float bins = static_cast<float>(BINS - 1), range = highest - lowest, by = range > 0.0f ? bins / range : 0.0f;
  memory.bin_of.resize(static_cast<size_t>(width));
  int32_t* to = memory.bin_of.data();
  for (int64_t i = 0; i < width; ++i) {
    const float at = (highest - logits[i]) * by;
    to[i] = weights[i] > 0.0f ? static_cast<int32_t>(at < bins ? at : bins) : BINS;
  }
  memory.counts.assign(BINS + 1, 0);
  memory.masses.assign(BINS + 1, 0.0);
  for (int64_t i = 0; i < width; ++i) {
    ++memory.counts[static_cast<size_t>(to[i])];
    memory.masses[static_cast<size_t>(to[i])] += static_cast<double>(weights[i]);
  }
}

// Gives the first of the candidates in order their weights back, for as long as stays(tokens taken, their mass).
template <typename Stays>
void take_head(std::vector<Candidate>& candidates, float* weights, Stays stays) {
  size_t sorted = 0, taken = 0;
  double mass = 0.0;
  while (taken < candidates.size() && stays(static_cast<int64_t>(taken), mass)) {
    if (taken == sorted) {
      const size_t upto = std::min(candidates.size(), std::max(SORTED_AT_FIRST, sorted * 4));
      const auto from = candidates.begin() + static_cast<int64_t>(sorted), to = candidates.begin() + static_cast<int64_t>(upto);
      std::partial_sort(from, to, candidates.end(), comes_first);
      sorted = upto;
    }
    const Candidate& next = candidates[taken++];
    mass += static_cast<double>(next.weight);
    weights[next.token] = next.weight;
  }
}

// Keeps the bins before `end` and makes the tokens of `end` candidates, without their weights.
void split_at(int32_t end, const float* logits, float* weights, int64_t width, FilterMemory& memory) {
  memory.candidates.clear();
  const int32_t* bin_of = memory.bin_of.data();
  for (int64_t i = 0; i < width; ++i) {
    if (bin_of[i] == end) memory.candidates.push_back({logits[i], weights[i], i});
    weights[i] = bin_of[i] < end ? weights[i] : 0.0f;
  }
}

void keep_top_k(const float* logits, float* weights, int64_t width, int64_t top_k, FilterMemory& memory) {
  fill_bins(logits, weights, width, memory);
  int64_t before = 0;
  for (int32_t bin = 0; bin < BINS; ++bin) {
    const int64_t count = memory.counts[static_cast<size_t>(bin)];
    if (before + count > top_k) {
      split_at(bin, logits, weights, width, memory);
      return take_head(memory.candidates, weights, [&](int64_t taken, double) { return before + taken < top_k; });
    }
    before += count;
  }
}

// As keep_top_p, for so few tokens that sorting them is less than counting the row.
void keep_top_p_of_few(const float* logits, float* weights, int64_t width, float top_p, std::vector<Candidate>& candidates) {
  candidates.clear();
  double total = 0.0;
  for (int64_t i = 0; i < width; ++i)
    if (weights[i] > 0.0f) {
      candidates.push_back({logits[i], weights[i], i});
      total += static_cast<double>(weights[i]);
      weights[i] = 0.0f;
    }
  const double wanted = total * static_cast<double>(top_p);
  // The first token of all stays whatever top_p is.
  take_head(candidates, weights, [&](int64_t taken, double mass) { return taken == 0 || mass < wanted; });
}

void keep_top_p(const float* logits, float* weights, int64_t width, float top_p, FilterMemory& memory) {
  int64_t left = 0;
  for (int64_t i = 0; i < width; ++i) left += weights[i] > 0.0f;
  if (left <= static_cast<int64_t>(SORTED_AT_FIRST)) return keep_top_p_of_few(logits, weights, width, top_p, memory.candidates);
  fill_bins(logits, weights, width, memory);
  double total = 0.0, before = 0.0;
  for (int32_t bin = 0; bin < BINS; ++bin) total += memory.masses[static_cast<size_t>(bin)];
  const double wanted = total * static_cast<double>(top_p);
  for (int32_t bin = 0; bin < BINS; ++bin) {
    const double mass = memory.masses[static_cast<size_t>(bin)];
    if (mass > 0.0 && before + mass >= wanted) {
      split_at(bin, logits, weights, width, memory);
      return take_head(memory.candidates, weights, [&](int64_t taken, double of_these) {
        return (before == 0.0 && taken == 0) || before + of_these < wanted;
      });
    }
    before += mass;
  }
}

}  // namespace

void filter(const float* logits, float* weights, int64_t width, const Filters& filters, FilterMemory& memory) {
  if (filters.min_p > 0.0f) drop_light(weights, width, filters.min_p);
  if (filters.top_k > 0 && filters.top_k < width) keep_top_k(logits, weights, width, filters.top_k, memory);
  if (filters.top_p < 1.0f) keep_top_p(logits, weights, width, filters.top_p, memory);
}
