// A whole step in which every sequence feeds the token that it drew last and draws the next one, in one call: threads that have sequences of their own look
// up their embedding, compute their layers and logits, and draw their tokens, without waiting for each other once.
//
// The kernels are those that Python would call one by one, in the same order, so the bits are the same too.
#include <algorithm>
#include <new>
#include <vector>

#include "calls.h"
#include "dense_layers.h"
#include "dense_matrix.h"
#include "direct.h"
#include "parallel.h"
#include "rows.h"

// The structures of decode_step.py, field by field.

// The state of an engine's rows, one number each but for block_tables[rows, columns].
struct DecodeRows {
  const int64_t *last_token, *length, *random_key, *top_k;
  const float *temperature, *top_p, *min_p;
  const int32_t* block_tables;
  int64_t rows, columns;
};

// Before and after the layers. Factors of 1 change nothing, nor does a cap of 0. The embedding is packed where it says so.
struct DecodeEnds {
  DenseMatrix head;
  const float* embedding;
  int64_t is_packed, head_precision;
  float embedding_factor, head_factor, cap;
};

namespace {

constexpr int NO_SUCH_ROW = 1, NO_SUCH_TOKEN = 2;
// A larger head is read from memory, once by all threads together rather than once by each.
constexpr int64_t HEAD_BYTES_IN_CACHE = 32 << 20;

void multiply_all(float* x, int64_t count, float factor) {
  if (factor == 1.0f) return;
  const V by = set1(factor);
  each_vector(count, [&](int64_t i, int n) { put(x + i, mul(get(x + i, n), by), n); });
}

// Number `position` of the SplitMix64 stream that starts from `key`, as random_numbers.py has it.
double uniform_at(int64_t key, int64_t position) {
  uint64_t z = static_cast<uint64_t>(key) + (static_cast<uint64_t>(position) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

// What a step reads of its rows, in their order.
struct StepRows {
  std::vector<int64_t> tokens, positions, slots, top_k;
  std::vector<int32_t> starts, contexts, tables;
  std::vector<float> temperature, top_p, min_p;
  std::vector<double> uniform;
  int64_t table_width = 1;

  // Returns 0, or NO_SUCH_ROW for one that the state does not have, or that is empty or longer than its block table.
  int read(const DecodeRows& state, const int64_t* index, int64_t count) {
    starts.push_back(0);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = index[i];
      if (r < 0 || r >= state.rows || state.length[r] < 1 || state.length[r] > state.columns * BLOCK_TOKENS) return NO_SUCH_ROW;
      const int64_t length = state.length[r], position = length - 1, column = position / BLOCK_TOKENS;
      tokens.push_back(state.last_token[r]);
      positions.push_back(position);
      slots.push_back(state.block_tables[r * state.columns + column] * BLOCK_TOKENS + position % BLOCK_TOKENS);
      starts.push_back(static_cast<int32_t>(i + 1));
      contexts.push_back(static_cast<int32_t>(length));
      top_k.push_back(state.top_k[r]);
      temperature.push_back(state.temperature[r]);
      top_p.push_back(state.top_p[r]);
      min_p.push_back(state.min_p[r]);
      uniform.push_back(uniform_at(state.random_key[r], length));
      table_width = std::max(table_width, column + 1);
    }
    tables.resize(static_cast<size_t>(count * table_width));
    for (int64_t i = 0; i < count; ++i) std::copy_n(state.block_tables + index[i] * state.columns, table_width, tables.data() + i * table_width);
    return 0;
  }

  FlatBatch batch() const {
    const int64_t count = static_cast<int64_t>(tokens.size());
    return {count, positions.data(), slots.data(), starts.data(), contexts.data(), tables.data(), count, table_width, nullptr, -1};
  }
};

class Ends final : public RowWork {
 public:
  // `kept` [rows, width] receives what the head reads, before it is multiplied; null where it is not kept.
  Ends(const DecodeEnds& ends, const StepRows& rows, float* residual, float* hidden, float* logits, int64_t* tokens, float* raw, float* sampling, float* kept)
      : ends_(ends), rows_(rows), residual_(residual), hidden_(hidden), logits_(logits), tokens_(tokens), raw_(raw), sampling_(sampling), kept_(kept) {}

  bool draws_apart() const { return bytes_of(ends_.head, precision()) <= HEAD_BYTES_IN_CACHE; }

  int before(int64_t first, int64_t rows) const override {
    const int64_t width = ends_.head.columns, vocabulary = ends_.head.rows, *tokens = rows_.tokens.data() + first;
    float* to = residual_ + first * width;
    if (ends_.is_packed) {
      if (tandem_packed_rows(ends_.embedding, vocabulary, width, tokens, rows, to)) return NO_SUCH_TOKEN;
    } else {
      for (int64_t i = 0; i < rows; ++i) {
        if (tokens[i] < 0 || tokens[i] >= vocabulary) return NO_SUCH_TOKEN;
        std::copy_n(ends_.embedding + tokens[i] * width, width, to + i * width);
      }
    }
    multiply_all(to, rows * width, ends_.embedding_factor);
    return 0;
  }

  int after(int64_t first, int64_t rows) const override {
    const int64_t width = ends_.head.columns;
    if (kept_) std::copy_n(hidden_ + first * width, rows * width, kept_ + first * width);
    return draws_apart() ? draw(first, rows) : 0;
  }

  int draw(int64_t first, int64_t rows) const {
    const int64_t width = ends_.head.columns, vocabulary = ends_.head.rows;
    float *x = hidden_ + first * width, *logits = logits_ + first * vocabulary;
    multiply_all(x, rows * width, ends_.head_factor);
    multiply(ends_.head, precision(), x, rows, logits);
    if (ends_.cap != 0.0f) tandem_soft_cap(logits, rows, vocabulary, ends_.cap, logits);
    const int code = tandem_sample(logits, rows, vocabulary, rows_.temperature.data() + first, rows_.top_k.data() + first, rows_.top_p.data() + first,
                                   rows_.min_p.data() + first, rows_.uniform.data() + first, tokens_ + first, raw_ + first, sampling_ + first);
    if (code == OUT_OF_MEMORY) throw std::bad_alloc();
    return code;
  }

 private:
  int precision() const { return static_cast<int>(ends_.head_precision); }

  const DecodeEnds& ends_;
  const StepRows& rows_;
  float *residual_, *hidden_, *logits_;
  int64_t* tokens_;
  float *raw_, *sampling_, *kept_;
};

}  // namespace

extern "C" {

// Computes the next token of each of the rows index[count]: tokens[count], and its log-probabilities as tandem_sample gives them. Returns 0, 1 for a row that is
// not there or has no token, 2 for a token that is not in the vocabulary, or a code of tandem_dense_layers from 10 on. `kept` (null: nothing) receives the inputs
// of `kept_count` layers as in LayerInputs, or, of none, what is after the last norm.
int tandem_decode_step(const DenseLayer* layers, int64_t layer_count, const DenseCache* caches, int precision, const float* norm, const DecodeEnds* ends,
                       const DecodeRows* state, const int64_t* index, int64_t count, int64_t* tokens, float* raw, float* sampling,
                       const int64_t* kept_layers, int64_t kept_count, float* kept) {
  return or_out_of_memory([&] {
    StepRows rows;
    if (const int code = rows.read(*state, index, count)) return code;
    thread_local Scratch memory;
    const int64_t width = ends->head.columns;
    float *residual = memory.floats(count * (2 * width + ends->head.rows)), *hidden = residual + count * width;
    const Ends work(*ends, rows, residual, hidden, hidden + count * width, tokens, raw, sampling, kept_count ? nullptr : kept);
    const DenseModel model = {layers, layer_count, caches, precision, norm};
    const FlatBatch batch = rows.batch();
    int code = 0;
    const auto run = [&] { code = run_dense_layers(model, batch, {kept_layers, kept_count, kept}, residual, hidden, &work); };
    // A quantized head shares its loops by OpenMP.
    if (ends->head.format == PACKED)
      in_team(model, batch, run);
    else
      run();
    return code || work.draws_apart() ? code : work.draw(0, count);
  });
}

}  // extern "C"

DIRECT(decode_step);
