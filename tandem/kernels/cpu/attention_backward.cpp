// The gradient of packed attention, by recomputation from the saved logarithms of the softmax's denominators
// (Dao et al., 2022). One task is one sequence and one key-value head, walked in order, so no sum depends on the threads.
#include "attention.h"
#include "parallel.h"

namespace {

struct Head {
  int64_t size, tiles, row_stride;      // of k and v, in elements
  const float *k;                       // rows, for grad_q
  const float *k_tiles, *v_tiles;       // [tiles][size][16]
  float *grad_k_tiles, *grad_v_tiles;
};

// For R rows: with p = exp(scale q.k - log_sum) and e = scale p (grad.v - delta),
// grad_q = e k, grad_k += e^T q, grad_v += p^T grad.
template <int ROWS>
void backward_rows(const Rows& rows, const float* const* grad, const float* const* out, const float* log_sum, float scale, const Head& h,
                   float* const* grad_q) {
  alignas(64) SpanBuffer weights, slopes;
  alignas(64) float sums[ROWS][MAX_HEAD_SIZE];
  V delta[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    std::fill_n(sums[r], (h.size + LANES - 1) / LANES * LANES, 0.0f);
    V along = zero();
    each_vector(h.size, [&](int64_t d, int n) { along = fma(get(grad[r] + d, n), get(out[r] + d, n), along); });
    delta[r] = set1(sum(along));
  }
  const int64_t first_tile = rows.first_tile(), last_position = rows.last_position(), tile = h.size * BLOCK_TOKENS;
  const int64_t last_tile = (last_position + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  const V factor = set1(scale);
  for (int64_t first = first_tile; first < last_tile;) {
    const int64_t last = std::min(last_tile, (first / SPAN_TILES + 1) * SPAN_TILES);
    dot_tiles<ROWS, tiles_at_once(ROWS)>(rows.data, h.size, first, last, [&](int64_t t) { return h.k_tiles + t * tile; }, weights[0]);
    dot_tiles<ROWS, tiles_at_once(ROWS)>(grad, h.size, first, last, [&](int64_t t) { return h.v_tiles + t * tile; }, slopes[0]);
    for (int64_t t = first; t < last; ++t) {
      V p[ROWS], e[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        float *weight = weights[r] + (t - first) * LANES, *slope = slopes[r] + (t - first) * LANES;
        p[r] = exp(sub(mask_unseen(mul(load(weight), factor), rows, r, t, NEVER), set1(log_sum[r])));
        e[r] = mul(mul(p[r], sub(load(slope), delta[r])), factor);
        store(slope, e[r]);
      }
      float *to_k = h.grad_k_tiles + t * tile, *to_v = h.grad_v_tiles + t * tile;
      for (int64_t d = 0; d < h.size; ++d) {
        V k = load(to_k + d * LANES), v = load(to_v + d * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          k = fma(e[r], set1(rows.data[r][d]), k);
          v = fma(p[r], set1(grad[r][d]), v);
        }
        store(to_k + d * LANES, k);
        store(to_v + d * LANES, v);
      }
    }
    add_weighted_rows<ROWS>(slopes, first, std::min(last_position, last * BLOCK_TOKENS), h.row_stride, h.size,
                            [&](int64_t t) { return h.k + t * BLOCK_TOKENS * h.row_stride; }, sums[0], MAX_HEAD_SIZE);
    first = last;
  }
  for (int r = 0; r < ROWS; ++r) each_vector(h.size, [&](int64_t d, int n) { put(grad_q[r] + d, load(sums[r] + d), n); });
}

}  // namespace

extern "C" {

// Gradients by q[tokens, heads, size] and k, v[tokens, kv_heads, size]; every token must lie in a sequence.
int tandem_packed_attention_backward(const float* grad, const float* q, const float* k, const float* v, const float* out,
                                     const float* log_sum, const int32_t* bounds, int64_t sequences, int64_t heads, int64_t kv_heads,
                                     int64_t size, float scale, int64_t window, float* grad_q, float* grad_k, float* grad_v) {
  const int64_t row = kv_heads * size, tile = BLOCK_TOKENS * size, group = heads / kv_heads;
  int64_t work = 0;
  for (int64_t s = 0; s < sequences; ++s) work += static_cast<int64_t>(bounds[s + 1] - bounds[s]) * (bounds[s + 1] - bounds[s]);
  const int threads = threads_for(work * heads * size * 2);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
  for (int64_t task = 0; task < sequences * kv_heads; ++task) {
    const int64_t begin = bounds[task / kv_heads], length = bounds[task / kv_heads + 1] - begin, kv_head = task % kv_heads;
    if (length == 0) continue;
    thread_local Scratch memory;
    const int64_t tiles = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS, all = tiles * tile;
    float* at = memory.floats(4 * all);
    std::fill_n(at + 2 * all, 2 * all, 0.0f);
    const int64_t offset = begin * row + kv_head * size;
    transpose_tiles(k + offset, row, length, size, at, tile);
    transpose_tiles(v + offset, row, length, size, at + all, tile);
    const Head head = {size, tiles, row, k + offset, at, at + all, at + 2 * all, at + 3 * all};
    for (int64_t i = 0; i < length * group; i += MAX_ROWS_AT_ONCE) {
      Rows rows;
      const float *row_grad[MAX_ROWS_AT_ONCE], *row_out[MAX_ROWS_AT_ONCE];
      float row_log_sum[MAX_ROWS_AT_ONCE], *row_grad_q[MAX_ROWS_AT_ONCE];
      rows.count = static_cast<int>(std::min<int64_t>(MAX_ROWS_AT_ONCE, length * group - i));
      for (int r = 0; r < rows.count; ++r) {
        const int64_t position = (i + r) / group, index = (begin + position) * heads + kv_head * group + (i + r) % group;
        rows.data[r] = q + index * size;
        rows.begin[r] = window ? std::max<int64_t>(0, position - window + 1) : 0;
        rows.end[r] = position + 1;
        row_grad[r] = grad + index * size;
        row_out[r] = out + index * size;
        row_log_sum[r] = log_sum[index];
        row_grad_q[r] = grad_q + index * size;
      }
      for_row_count(rows.count, [&](auto n) { backward_rows<decltype(n)::value>(rows, row_grad, row_out, row_log_sum, scale, head, row_grad_q); });
    }
    untranspose_tiles(head.grad_k_tiles, tile, length, size, grad_k + offset, row);
    untranspose_tiles(head.grad_v_tiles, tile, length, size, grad_v + offset, row);
  }
  return 0;
}

}  // extern "C"
