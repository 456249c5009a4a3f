// The gated delta rule, token by token, with the order of sums of tandem/kernels/gated_delta.py. Heads of sequences are independent of each other.
#include <cstdint>
#include <cstring>

#include "parallel.h"

namespace {

constexpr int64_t CHUNK = 64;  // the backward pass keeps the state of every so many tokens
constexpr int64_t LANES = 16;

struct Sizes {
  int64_t key_heads, heads, keys, values;
  int64_t state() const { return keys * values; }
};

// One head's inputs at a token.
struct Token {
  const float *q, *k, *v;
  float decay, beta;
};

struct Inputs {
  const float *q, *k, *v, *decay, *beta;
  Token at(int64_t t, int64_t head, const Sizes& n) const {
    const int64_t key_head = t * n.key_heads + head / (n.heads / n.key_heads), own = t * n.heads + head;
    return {q + key_head * n.keys, k + key_head * n.keys, v + own * n.values, decay[own], beta[own]};
  }
};

// recalled[values] = x[keys] times state[keys, values], in the order of keys.
void recall(const float* __restrict state, const float* __restrict x, const Sizes& n, float* __restrict recalled) {
  for (int64_t j = 0; j < n.values; ++j) recalled[j] = state[j] * x[0];
  for (int64_t i = 1; i < n.keys; ++i)
    for (int64_t j = 0; j < n.values; ++j) recalled[j] = recalled[j] + state[i * n.values + j] * x[i];
}

// error[values] = v - what the decayed state recalls.
void errors(float* __restrict state, const Token& token, const Sizes& n, float* __restrict error) {
  for (int64_t i = 0; i < n.state(); ++i) state[i] = state[i] * token.decay;
  recall(state, token.k, n, error);
  for (int64_t j = 0; j < n.values; ++j) error[j] = token.v[j] - error[j];
}

void correct(float* __restrict state, const Token& token, const Sizes& n, const float* __restrict delta) {
  for (int64_t i = 0; i < n.keys; ++i)
    for (int64_t j = 0; j < n.values; ++j) state[i * n.values + j] = state[i * n.values + j] + token.k[i] * delta[j];
}

void step(float* __restrict state, const Token& token, const Sizes& n, float* __restrict delta) {
  errors(state, token, n, delta);
  for (int64_t j = 0; j < n.values; ++j) delta[j] = delta[j] * token.beta;
  correct(state, token, n, delta);
}

float dot(const float* a, const float* b, int64_t count) {
  float lanes[LANES] = {};
  int64_t j = 0;
  for (; j + LANES <= count; j += LANES)
    for (int64_t l = 0; l < LANES; ++l) lanes[l] = lanes[l] + a[j + l] * b[j + l];
  for (int64_t l = 0; j + l < count; ++l) lanes[l] = lanes[l] + a[j + l] * b[j + l];
  float total = lanes[0];
  for (int64_t l = 1; l < LANES; ++l) total = total + lanes[l];
  return total;
}

struct Gradients {
  float *q, *k, *v, *decay, *beta;
};

// The gradients of one token. of_state: in, of the state `after` it by later tokens; out, of the state `before` it. `memory`: a state and two rows of values.
void step_backward(const Token& token, const Sizes& n, const float* grad, const float* before, const float* after, float* of_state, float* memory,
                   const Gradients& own) {
  float *decayed = memory, *error = memory + n.state(), *delta = error + n.values;
  std::memcpy(decayed, before, sizeof(float) * n.state());
  errors(decayed, token, n, error);
  for (int64_t j = 0; j < n.values; ++j) delta[j] = error[j] * token.beta;
  for (int64_t i = 0; i < n.keys; ++i) {
    float* row = of_state + i * n.values;
    for (int64_t j = 0; j < n.values; ++j) row[j] = row[j] + token.q[i] * grad[j];
    own.q[i] = dot(after + i * n.values, grad, n.values);
    own.k[i] = dot(row, delta, n.values);
  }
  recall(of_state, token.k, n, own.v);
  own.beta[0] = dot(own.v, error, n.values);
  for (int64_t j = 0; j < n.values; ++j) own.v[j] = own.v[j] * token.beta;
  float of_decay = 0.0f;
  for (int64_t i = 0; i < n.keys; ++i) {
    float* row = of_state + i * n.values;
    own.k[i] = own.k[i] - dot(decayed + i * n.values, own.v, n.values);
    for (int64_t j = 0; j < n.values; ++j) row[j] = row[j] - token.k[i] * own.v[j];
    of_decay = of_decay + dot(row, before + i * n.values, n.values);
    for (int64_t j = 0; j < n.values; ++j) row[j] = row[j] * token.decay;
  }
  own.decay[0] = of_decay;
}

}  // namespace

extern "C" {

// q, k [T, key_heads, keys], v [T, heads, values], decay, beta [T, heads] -> out [T, heads, values]. Sequence s is tokens bounds[s] to bounds[s + 1]; its states
// are those of states[rows[s]] [heads, keys, values], changed in place, or without `states` zero and dropped; zero too at its start where fresh[s]. The state
// after token t is copied to states[kept[t]] too, where that is not negative (`kept` may be null).
int tandem_gated_delta(const float* q, const float* k, const float* v, const float* decay, const float* beta, const int64_t* bounds, int64_t sequences,
                       int64_t key_heads, int64_t heads, int64_t keys, int64_t values, float* states, const int64_t* rows, const bool* fresh,
                       const int64_t* kept, float* out) {
  const Sizes n{key_heads, heads, keys, values};
  const Inputs inputs{q, k, v, decay, beta};
  const int threads = threads_for(bounds[sequences] * heads * n.state() * 4);
  Failure failure;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < sequences * heads; ++task)
    failure.guard([&] {
      thread_local Scratch memory;
      const int64_t s = task / heads, head = task % heads;
      float* own = memory.floats(n.state() + values);
      float* delta = own + n.state();
      float* state = states == nullptr ? own : states + (rows[s] * heads + head) * n.state();
      if (states == nullptr || fresh[s]) std::memset(state, 0, sizeof(float) * n.state());
      for (int64_t t = bounds[s]; t < bounds[s + 1]; ++t) {
        const Token token = inputs.at(t, head, n);
        step(state, token, n, delta);
        recall(state, token.q, n, out + (t * heads + head) * values);
        if (kept != nullptr && kept[t] >= 0) std::memcpy(states + (kept[t] * heads + head) * n.state(), state, sizeof(float) * n.state());
      }
    });
  return or_out_of_memory([&] { failure.raise(); });
}

// The gradients of `tandem_gated_delta` without states, those of q and k for each head [T, heads, keys].
int tandem_gated_delta_backward(const float* grad, const float* q, const float* k, const float* v, const float* decay, const float* beta,
                                const int64_t* bounds, int64_t sequences, int64_t key_heads, int64_t heads, int64_t keys, int64_t values, float* of_q,
                                float* of_k, float* of_v, float* of_decay, float* of_beta) {
  const Sizes n{key_heads, heads, keys, values};
  const Inputs inputs{q, k, v, decay, beta};
  const int threads = threads_for(bounds[sequences] * heads * n.state() * 16);
  Failure failure;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < sequences * heads; ++task)
    failure.guard([&] {
      thread_local Scratch scratch;
      const int64_t s = task / heads, head = task % heads, start = bounds[s], end = bounds[s + 1], size = n.state();
      const int64_t chunks = (end - start + CHUNK - 1) / CHUNK;
      float* kept = scratch.floats((chunks + CHUNK + 3) * size + 3 * values);
      float *states = kept + chunks * size, *of_state = states + (CHUNK + 1) * size, *memory = of_state + size, *delta = memory + size + 2 * values;
      float* state = states;
      std::memset(state, 0, sizeof(float) * size);
      for (int64_t t = start; t < end; ++t) {
        if ((t - start) % CHUNK == 0) std::memcpy(kept + (t - start) / CHUNK * size, state, sizeof(float) * size);
        step(state, inputs.at(t, head, n), n, delta);
      }
      std::memset(of_state, 0, sizeof(float) * size);
      for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
        const int64_t first = start + chunk * CHUNK, last = first + CHUNK < end ? first + CHUNK : end;
        std::memcpy(states, kept + chunk * size, sizeof(float) * size);
        for (int64_t t = first; t < last; ++t) {
          float* next = states + (t - first + 1) * size;
          std::memcpy(next, next - size, sizeof(float) * size);
          step(next, inputs.at(t, head, n), n, delta);
        }
        for (int64_t t = last - 1; t >= first; --t) {
          const int64_t own = t * heads + head;
          const float* before = states + (t - first) * size;
          step_backward(inputs.at(t, head, n), n, grad + own * values, before, before + size, of_state, memory,
                        {of_q + own * keys, of_k + own * keys, of_v + own * values, of_decay + own, of_beta + own});
        }
      }
    });
  return or_out_of_memory([&] { failure.raise(); });
}

}  // extern "C"
