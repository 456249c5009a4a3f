// Min-p, top-k and top-p on one row of weights, without sorting the row.
#pragma once

#include <cstdint>
#include <vector>

struct Filters {
  int64_t top_k;
  float top_p, min_p;

  bool any(int64_t width) const { return (top_k > 0 && top_k < width) || top_p < 1.0f || min_p > 0.0f; }
};

struct Candidate {
  float logit, weight;
  int64_t token;
};

struct FilterMemory {
  std::vector<int32_t> bin_of, counts;
  std::vector<double> masses;
  std::vector<Candidate> candidates;
};

// Sets to 0 the weights of the tokens that the filters drop, in the order min-p, top-k, top-p, each on what the one before
// left. weights[width] are exp(logit / temperature - highest of these), so the heaviest is 1. Among equal logits low ids stay.
void filter(const float* logits, float* weights, int64_t width, const Filters& filters, FilterMemory& memory);
