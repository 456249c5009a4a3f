// What writes and reads weights that several processes share in packed form.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "calls.h"
#include "direct.h"
#include "gemm.h"
#include "parallel.h"
#include "vec.h"
#include "xxh3.h"

namespace {

using xxh3::Words;

// Calls write(offset in bytes, stripe) for every stripe of weight[n, k] in panels, in order. A tile of 16 columns of a panel is transposed in the first-level
// cache, from where it is digested and written in one pass. A panel's rows are too many streams for the processor to fetch ahead by itself.
template <typename Write>
void write_panels(const float* weight, int64_t n, int64_t k, int64_t bytes, uint8_t* out, Write write) {
  constexpr int64_t ROW_STRIPES = LANES * sizeof(float) / xxh3::STRIPE;
  static_assert(ROW_STRIPES == 1);
  alignas(64) float tile[PANEL * LANES];
  xxh3::Digest digest(bytes);
  int64_t at = 0;
  for (int64_t first = 0; first < n; first += PANEL) {
    const int64_t width = std::min(PANEL, n - first), panel = first / PANEL;
    for (int64_t k0 = 0; k0 < k; k0 += LANES) {
      const int64_t deep = std::min<int64_t>(LANES, k - k0);
      const float* from = weight + first * k + k0;
      if (deep == LANES)
        for (int64_t r = 0; r < width; r += LANES, from += LANES * k) {
#pragma GCC unroll 16
          for (int i = 0; i < LANES; ++i) __builtin_prefetch(from + i * k + LANES, 0, 3);
          transpose_block(from, k, tile + r, width);
        }
      else
        pack_part({weight, Layout::COLUMNS, k}, n, panel, k0, deep, tile);
      const int64_t stripes = deep * width / LANES, before_last = std::min(stripes, digest.before_last() - at / xxh3::STRIPE);
      const auto next = [&](int64_t i) __attribute__((always_inline)) {
        const Words stripe = xxh3::load_words(tile + i * LANES);
        write(at + i * xxh3::STRIPE, stripe);
        return stripe;
      };
      digest.add(before_last, next);
      if (before_last < stripes) digest.finish(next(before_last), out);
      at += stripes * xxh3::STRIPE;
    }
  }
}

template <typename Write>
void copy_and_digest(const char* from, int64_t bytes, uint8_t* out, Write write) {
  xxh3::Digest digest(bytes);
  digest.add(digest.before_last(), [&](int64_t i) __attribute__((always_inline)) {
    const Words stripe = xxh3::load_words(from + i * xxh3::STRIPE);
    write(i * xxh3::STRIPE, stripe);
    return stripe;
  });
  digest.finish(xxh3::load_words(from + bytes - xxh3::STRIPE), out);
}

}  // namespace

extern "C" {

// Rows k0 .. k0 + deep of panel `panel` of weight[n, k]'s packed form, on this thread alone: its caller has threads of its own.
void tandem_pack_part(const float* weight, int64_t n, int64_t k, int64_t panel, int64_t k0, int64_t deep, float* to) {
  pack_part({weight, Layout::COLUMNS, k}, n, panel, k0, deep, to);
}

// Writes weight[n, k], n a multiple of 16, in panels to `to` (null: nowhere) past the cache, on this thread alone, and the xxh3-128 of the panels to `digest`.
// They have more than 240 bytes.
void tandem_write_panels(const float* weight, int64_t n, int64_t k, char* to, uint8_t* digest) {
  const int64_t bytes = n * k * static_cast<int64_t>(sizeof(float));
  const bool aligned = reinterpret_cast<uintptr_t>(to) % xxh3::STRIPE == 0;
  if (to == nullptr)
    write_panels(weight, n, k, bytes, digest, [](int64_t, Words) {});
  else if (aligned)
    write_panels(weight, n, k, bytes, digest, [to](int64_t at, Words stripe) { xxh3::stream_words(to + at, stripe); });
  else
    write_panels(weight, n, k, bytes, digest, [to](int64_t at, Words stripe) { xxh3::store_words(to + at, stripe); });
  xxh3::end_of_stream();
}

// Copies `bytes`, more than 240, to where they do not overlap, past the cache, on this thread alone, and writes their xxh3-128 to `digest`.
void tandem_copy_and_digest(char* to, const char* from, int64_t bytes, uint8_t* digest) {
  if (reinterpret_cast<uintptr_t>(to) % xxh3::STRIPE == 0)
    copy_and_digest(from, bytes, digest, [to](int64_t at, Words stripe) { xxh3::stream_words(to + at, stripe); });
  else
    copy_and_digest(from, bytes, digest, [to](int64_t at, Words stripe) { xxh3::store_words(to + at, stripe); });
  // The bytes behind the last whole stripe.
  const int64_t rest = (bytes - 1) / xxh3::STRIPE * xxh3::STRIPE;
  std::memcpy(to + rest, from + rest, static_cast<size_t>(bytes - rest));
  xxh3::end_of_stream();
}

// out[i] = row rows[i] of the matrix [n, k] that is packed: an embedding's table that is the head too. Returns 1 for a row that it does not have.
int tandem_packed_rows(const float* packed, int64_t n, int64_t k, const int64_t* rows, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= n) return 1;
  const int threads = threads_for(16 * count * k);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) {
    const int64_t panel = rows[i] / PANEL, columns = n - panel * PANEL;
    const int64_t width = columns >= PANEL ? PANEL : (columns + 15) / 16 * 16;
    const float* from = packed + panel * PANEL * k + rows[i] % PANEL;
    for (int64_t j = 0; j < k; ++j) out[i * k + j] = from[j * width];
  }
  return 0;
}

}  // extern "C"

DIRECT(packed_rows);
