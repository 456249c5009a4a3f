// From the fused query-key-value projection to rotated heads: split, per-head norm, rotary embedding, and the cache.
#include <algorithm>
#include <vector>

#include "cache.h"
#include "calls.h"
#include "direct.h"
#include "parallel.h"

namespace {

constexpr int64_t TOKENS_PER_SUM = 64;
constexpr int64_t MAX_HEAD = 1024;

// out[:h] = a cos - b sin, out[h:] = b cos + a sin, for the halves a, b of x (sin negated: the inverse). out may be x.
INLINE void rotate(const float* x, const float* cos_sin, int64_t size, float sign, float* out) {
  const int64_t half = size / 2;
  const V direction = set1(sign);
  each_vector(half, [&](int64_t i, int n) {
    const V a = get(x + i, n), b = get(x + half + i, n), c = get(cos_sin + i, n), s = mul(direction, get(cos_sin + half + i, n));
    put(out + i, fnma(b, s, mul(a, c)), n);
    put(out + half + i, fma(a, s, mul(b, c)), n);
  });
}

INLINE float head_forward(const float* x, const float* norm, float eps, const float* cos_sin, int64_t size, float* out) {
  float rstd = 1.0f;
  if (norm) {
    rstd = norm_row(x, norm, size, eps, out);
    x = out;
  }
  rotate(x, cos_sin, size, 1.0f, out);
  return rstd;
}

INLINE void head_backward(const float* x, const float* norm, float eps, const float* cos_sin, const float* grad, int64_t size,
                          float* grad_x, float* norm_sum) {
  rotate(grad, cos_sin, size, -1.0f, grad_x);
  if (!norm) return;
  const float rstd = 1.0f / std::sqrt(sum_of_squares(x, size) / static_cast<float>(size) + eps);
  norm_row_grad(x, norm, grad_x, rstd, size, grad_x, norm_sum);
}

bool positions_fit(const int64_t* positions, int64_t tokens, int64_t limit) {
  for (int64_t t = 0; t < tokens; ++t)
    if (positions[t] < 0 || positions[t] >= limit) return false;
  return true;
}

}  // namespace

extern "C" {

// qkv[tokens, (hq + 2 hkv) size]. Returns 1 where a position lies outside cos_sin[limit, size].
int tandem_rope(const float* qkv, const int64_t* positions, const float* cos_sin, int64_t tokens, int64_t limit, int64_t hq, int64_t hkv,
                int64_t size, const float* q_norm, const float* k_norm, float eps, float* q, float* k, float* v) {
  if (!positions_fit(positions, tokens, limit)) return 1;
  const int64_t row = (hq + 2 * hkv) * size;
  const int threads = threads_for(tokens * row * 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; ++t) {
    const float *from = qkv + t * row, *angles = cos_sin + positions[t] * size;
    for (int64_t h = 0; h < hq; ++h) head_forward(from + h * size, q_norm, eps, angles, size, q + (t * hq + h) * size);
    for (int64_t h = 0; h < hkv; ++h) head_forward(from + (hq + h) * size, k_norm, eps, angles, size, k + (t * hkv + h) * size);
    std::copy_n(from + (hq + hkv) * size, hkv * size, v + t * hkv * size);
  }
  return 0;
}

// As tandem_rope, with k and v written to their slots as `kind` says (cache.h); scales null where it needs none. Returns 2 where a
// slot lies outside the cache's blocks.
int tandem_rope_to_cache(const float* qkv, const int64_t* positions, const float* cos_sin, int64_t tokens, int64_t limit, int64_t hq,
                         int64_t hkv, int64_t size, const float* q_norm, const float* k_norm, float eps, float* q, int kind, void* keys,
                         void* values, float* key_scales, float* value_scales, int64_t blocks, const int64_t* slots) {
  if (!positions_fit(positions, tokens, limit)) return 1;
  if (!positions_fit(slots, tokens, blocks * BLOCK_TOKENS)) return 2;
  if (size > MAX_HEAD) return 3;
  const int64_t row = (hq + 2 * hkv) * size;
  const int threads = threads_for(tokens * row * 8);
  for_stored(kind, [&](auto stored) {
    using T = decltype(stored);
    const int64_t stored_each = stored_size<T>(size);
    // A key is written to as many cache lines as it has components, most of which are in memory: those of a token in another block are fetched one token ahead.
    const auto fetch_keys = [&](int64_t block) {
      constexpr int64_t LINE = 64;
      const int64_t bytes = hkv * stored_each * BLOCK_TOKENS * static_cast<int64_t>(sizeof(T));
      for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch(static_cast<const char*>(keys) + block * bytes + at, 1, 3);
    };
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t block = slots[t] / BLOCK_TOKENS, offset = slots[t] % BLOCK_TOKENS;
      if (t + 1 < tokens && slots[t + 1] / BLOCK_TOKENS != block) fetch_keys(slots[t + 1] / BLOCK_TOKENS);
      alignas(64) float head[MAX_HEAD];
      T codes[MAX_HEAD];
      const float *from = qkv + t * row, *angles = cos_sin + positions[t] * size;
      for (int64_t h = 0; h < hq; ++h) head_forward(from + h * size, q_norm, eps, angles, size, q + (t * hq + h) * size);
      for (int64_t h = 0; h < hkv; ++h) {
        const int64_t at = block * hkv + h;
        head_forward(from + (hq + h) * size, k_norm, eps, angles, size, head);
        const float key_scale = encode(head, size, codes);
        T* to = static_cast<T*>(keys) + at * stored_each * BLOCK_TOKENS + offset;
        for (int64_t d = 0; d < stored_each; ++d) to[d * BLOCK_TOKENS] = codes[d];
        const float value_scale = encode(from + (hq + hkv + h) * size, size, static_cast<T*>(values) + (at * BLOCK_TOKENS + offset) * stored_each);
        if constexpr (IS_SCALED<T>) {
          key_scales[at * BLOCK_TOKENS + offset] = key_scale;
          value_scales[at * BLOCK_TOKENS + offset] = value_scale;
        }
      }
    }
  });
  return 0;
}

// out = the numbers that a cache of `kind` gives back for rows[count, size]. out may be rows.
void tandem_round_kv(const float* rows, int kind, int64_t count, int64_t size, float* out) {
  const int threads = threads_for(count * size * 8);
  for_stored(kind, [&](auto stored) {
    using T = decltype(stored);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < count; ++i) {
      T codes[MAX_HEAD];
      const float scale = encode(rows + i * size, size, codes);
      each_code(codes, size, [&](int64_t d, int n, V x) { put(out + i * size + d, IS_SCALED<T> ? mul(x, set1(scale)) : x, n); });
    }
  });
}

// grad_norms[2, size]: of q_norm, then of k_norm. saved, grad_rows, first: of RepeatedRows; qkv and positions are of the rows `saved`.
int tandem_rope_backward(const float* qkv, const int64_t* positions, const float* cos_sin, const int64_t* saved, const int64_t* grad_rows,
                         const int64_t* first, int64_t tokens, int64_t hq, int64_t hkv, int64_t size, const float* q_norm, const float* k_norm, float eps,
                         const float* grad_q, const float* grad_k, const float* grad_v, float* grad_qkv, float* grad_norms) {
  return or_out_of_memory([&] {
    const RepeatedRows same = {saved, grad_rows, first};
    const int64_t row = (hq + 2 * hkv) * size, chunks = (tokens + TOKENS_PER_SUM - 1) / TOKENS_PER_SUM;
    std::vector<float> partials(static_cast<size_t>(chunks * 2 * size), 0.0f), unused(static_cast<size_t>(same.grad ? chunks * row : 0));
    const int threads = threads_for(tokens * row * 8);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t c = 0; c < chunks; ++c) {
      float* sums = partials.data() + c * 2 * size;
      for (int64_t t = c * TOKENS_PER_SUM; t < std::min(tokens, (c + 1) * TOKENS_PER_SUM); ++t) {
        const int64_t s = same.saved_of(t), g = same.grad_of(t);
        const float *from = qkv + s * row, *angles = cos_sin + positions[s] * size;
        float* to = same.is_first(t) ? grad_qkv + g * row : unused.data() + c * row;
        for (int64_t h = 0; h < hq; ++h)
          head_backward(from + h * size, q_norm, eps, angles, grad_q + (g * hq + h) * size, size, to + h * size, sums);
        for (int64_t h = 0; h < hkv; ++h)
          head_backward(from + (hq + h) * size, k_norm, eps, angles, grad_k + (g * hkv + h) * size, size, to + (hq + h) * size, sums + size);
        std::copy_n(grad_v + g * hkv * size, hkv * size, to + (hq + hkv) * size);
      }
    }
    sum_partials(partials.data(), chunks, 2 * size, grad_norms);
  });
}

}  // extern "C"

DIRECT(rope_to_cache);
