// The softmax of a task's rows, span by span.
#include "attention_task.h"

namespace {

// Some rows' softmax over one span or over several: the highest score, the sum of the weights exp(score - highest), and the values
// by those weights.
template <int ROWS>
struct State {
  float highest[ROWS], total[ROWS];
  alignas(64) float sums[ROWS][MAX_HEAD_SIZE];
};

// The softmax over the keys of the tiles first <= t < last, which lie in one span.
template <int ROWS, typename Scores>
__attribute__((noinline)) void attend_span(const Rows& rows, const Source& source, int64_t size, Scores scoring, int64_t first, int64_t last,
                                           State<ROWS>& state) {
  alignas(64) SpanBuffer scores;
  alignas(64) float decoded[DECODED_TILES * BLOCK_TOKENS * MAX_HEAD_SIZE];
  const int64_t padded = (size + LANES - 1) / LANES * LANES, step = source.tiles_at_once();
  const bool fetches = source.is_read_once && source.is_in_place(), widened = source.is_widened(), fetches_wide = source.is_read_once && widened;
  const auto dot_stored = [&](auto stored, auto ahead) {
    using T = decltype(stored);
    const Tiles<T> values = source.stored_values<T>();
    dot_tiles<ROWS, tiles_at_once(ROWS), ahead.value>(rows.data, size, first, last, source.stored_keys<T>(), scores[0], &values);
  };
  const auto add_stored = [&](auto stored, auto ahead) {
    using T = decltype(stored);
    add_weighted<ROWS, ahead.value>(scores[0], rows, first, last, size, source.stored_values<T>(), state.sums, source.stored_next<T>());
  };
  constexpr std::true_type AHEAD;
  constexpr std::false_type PLAIN;
  if (fetches)
    dot_stored(float{}, AHEAD);
  else if (fetches_wide)
    dot_stored(Bf16{}, AHEAD);
  else if (widened)
    dot_stored(Bf16{}, PLAIN);
  for (int64_t t = widened || fetches ? last : first; t < last; t += step) {
    const int64_t end = std::min(last, t + step);
    dot_tiles<ROWS, tiles_at_once(ROWS)>(rows.data, size, t, end, source.key_view(t, end, size, decoded), scores[0] + (t - first) * LANES);
  }
  for (int r = 0; r < ROWS; ++r) {
    std::fill_n(state.sums[r], padded, 0.0f);
    if (!rows.sees_tiles(r, first, last)) continue;
    V most = set1(NEVER), total = zero();
    for (int64_t t = first; t < last; ++t) {
      float* at = scores[r] + (t - first) * LANES;
      const V score = mask_unseen(scoring.score(load(at)), rows, r, t, NEVER);
      most = max(most, score);
      store(at, score);
    }
    state.highest[r] = max_lane(most);
    const V shift = set1(state.highest[r]);
    for (int64_t t = first; t < last; ++t) {
      float* at = scores[r] + (t - first) * LANES;
      const V weight = exp(sub(load(at), shift));
      total = add(total, weight);
      store(at, weight);
    }
    state.total[r] = sum(total);
  }
  if (fetches) return add_stored(float{}, AHEAD);
  if (fetches_wide) return add_stored(Bf16{}, AHEAD);
  if (widened) return add_stored(Bf16{}, PLAIN);
  for (int64_t t = first; t < last; t += step) {
    const int64_t end = std::min(last, t + step);
    add_weighted<ROWS>(scores[0] + (t - first) * LANES, rows, t, end, size, source.value_view(t, end, size, decoded), state.sums);
  }
}

// One row's softmax with that of a later span merged in.
INLINE void merge(float& highest, float& total, float* sums, float more_highest, float more_total, const float* more_sums, int64_t size) {
  const float now = std::max(highest, more_highest);
  const V keep = exp(set1(highest - now)), take = exp(set1(more_highest - now));
  alignas(64) float totals[LANES];
  store(totals, fma(set1(total), keep, mul(set1(more_total), take)));
  for (int64_t d = 0; d < size; d += LANES) store(sums + d, fma(load(sums + d), keep, mul(load(more_sums + d), take)));
  highest = now;
  total = totals[0];
}

// out = the values by their softmax; log_sum (where asked for) the logarithm of the softmax's denominator.
INLINE void finish(float highest, float total, const float* sums, int64_t size, float* out, float* log_sum) {
  const V divisor = set1(total);
  each_vector(size, [&](int64_t d, int n) { put(out + d, div(load(sums + d), divisor), n); });
  if (log_sum) *log_sum = highest + std::log(total);
}

// One row's softmax with the score of its head's sink (Xiao et al., 2023) merged in: a key without a value.
INLINE void add_sink(float& highest, float& total, float* sums, float sink, int64_t size) {
  const float now = std::max(highest, sink);
  const V keep = exp(set1(highest - now)), take = exp(set1(sink - now));
  alignas(64) float totals[LANES];
  store(totals, fma(set1(total), keep, take));
  for (int64_t d = 0; d < size; d += LANES) store(sums + d, mul(load(sums + d), keep));
  highest = now;
  total = totals[0];
}

// The tiles of span `span` that some row sees.
INLINE std::pair<int64_t, int64_t> tiles_of_span(const Rows& rows, int64_t span) {
  return {std::max(rows.first_tile(), span * SPAN_TILES), std::min(rows.last_tile(), (span + 1) * SPAN_TILES)};
}

template <int ROWS, typename Scores>
void attend(const Rows& rows, const Source& source, int64_t size, Scores scoring, const float* sinks, float* const* out, float* const* log_sum) {
  State<ROWS> state, more;
  bool begun[ROWS] = {};
  for (int64_t span = rows.first_tile() / SPAN_TILES; span * SPAN_TILES < rows.last_tile(); ++span) {
    const auto [first, last] = tiles_of_span(rows, span);
    const bool is_first = span == rows.first_tile() / SPAN_TILES;
    attend_span(rows, source, size, scoring, first, last, is_first ? state : more);
    for (int r = 0; r < ROWS; ++r) {
      if (!rows.sees_tiles(r, first, last)) continue;
      if (begun[r]) {
        merge(state.highest[r], state.total[r], state.sums[r], more.highest[r], more.total[r], more.sums[r], size);
      } else if (!is_first) {
        state.highest[r] = more.highest[r];
        state.total[r] = more.total[r];
        std::copy_n(more.sums[r], size, state.sums[r]);
      }
      begun[r] = true;
    }
  }
  if (sinks)
    for (int r = 0; r < ROWS; ++r) add_sink(state.highest[r], state.total[r], state.sums[r], sinks[r], size);
  for (int r = 0; r < ROWS; ++r) finish(state.highest[r], state.total[r], state.sums[r], size, out[r], log_sum ? log_sum[r] : nullptr);
}

}  // namespace

Rows rows_of(const Task& task, const Queries& q, int64_t i, int64_t* at) {
  Rows rows;
  rows.count = static_cast<int>(std::min<int64_t>(MAX_ROWS_AT_ONCE, q.rows_of(task) - i));
  for (int r = 0; r < rows.count; ++r) {
    const int64_t position = task.first + (i + r) / q.group();
    at[r] = (task.query_row + position) * q.heads + task.kv_head * q.group() + (i + r) % q.group();
    rows.data[r] = q.data + at[r] * q.size;
    rows.begin[r] = q.window ? std::max<int64_t>(0, position - q.window + 1) : 0;
    rows.end[r] = position + 1;
  }
  return rows;
}

void run_task(const Task& task, const Queries& q, Source source) {
  if (!source.is_in_place() && q.rows_of(task) > MAX_ROWS_AT_ONCE) {
    thread_local Scratch memory;
    const int64_t first = q.window ? std::max<int64_t>(0, task.first - q.window + 1) : 0;
    source = source.decoded(first / BLOCK_TOKENS, (task.last + BLOCK_TOKENS - 1) / BLOCK_TOKENS, q.size, memory);
  }
  for (int64_t i = 0; i < q.rows_of(task); i += MAX_ROWS_AT_ONCE) {
    int64_t at[MAX_ROWS_AT_ONCE];
    const Rows rows = rows_of(task, q, i, at);
    float *out[MAX_ROWS_AT_ONCE], *log_sum[MAX_ROWS_AT_ONCE], sinks[MAX_ROWS_AT_ONCE];
    for (int r = 0; r < rows.count; ++r) {
      if (q.sinks) sinks[r] = q.sinks[at[r] % q.heads];
      out[r] = q.out + at[r] * q.size;
      log_sum[r] = q.log_sum ? q.log_sum + at[r] : nullptr;
    }
    with_scores(q.scale, q.cap, [&](auto scoring) {
      for_row_count(rows.count, [&](auto n) { attend<decltype(n)::value>(rows, source, q.size, scoring, q.sinks ? sinks : nullptr, out, q.log_sum ? log_sum : nullptr); });
    });
  }
}

void run_piece(const Rows& rows, const Queries& q, const Source& source, int64_t span, int64_t width, float* floats) {
  for_row_count(rows.count, [&](auto n) {
    State<decltype(n)::value> state;
    const auto [first, last] = tiles_of_span(rows, span);
    with_scores(q.scale, q.cap, [&](auto scoring) { attend_span(rows, source, q.size, scoring, first, last, state); });
    for (int r = 0; r < rows.count; ++r, floats += width) {
      std::copy_n(state.sums[r], width - LANES, floats);
      floats[width - LANES] = state.highest[r];
      floats[width - LANES + 1] = state.total[r];
    }
  });
}

void merge_pieces(const Rows& rows, const Queries& q, const int64_t* at, int64_t width, float* floats) {
  const int64_t first_span = rows.first_tile() / SPAN_TILES, spans = (rows.last_tile() - 1) / SPAN_TILES - first_span + 1;
  for (int r = 0; r < rows.count; ++r) {
    float* state = nullptr;
    for (int64_t i = 0; i < spans; ++i) {
      const auto [first, last] = tiles_of_span(rows, first_span + i);
      if (!rows.sees_tiles(r, first, last)) continue;
      float* more = floats + (i * rows.count + r) * width;
      const int64_t end = width - LANES;
      if (state)
        merge(state[end], state[end + 1], state, more[end], more[end + 1], more, q.size);
      else
        state = more;
    }
    if (q.sinks) add_sink(state[width - LANES], state[width - LANES + 1], state, q.sinks[at[r] % q.heads], q.size);
    finish(state[width - LANES], state[width - LANES + 1], state, q.size, q.out + at[r] * q.size, q.log_sum ? q.log_sum + at[r] : nullptr);
  }
}
