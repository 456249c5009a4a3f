// What writes and reads weights that several processes share in packed form.
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "direct.h"
#include "gemm.h"
#include "parallel.h"

extern "C" {

// Rows k0 .. k0 + deep of panel `panel` of weight[n, k]'s packed form, on this thread alone: its caller has threads of its own.
void tandem_pack_part(const float* weight, int64_t n, int64_t k, int64_t panel, int64_t k0, int64_t deep, float* to) {
  pack_part({weight, Layout::COLUMNS, k}, n, panel, k0, deep, to);
}

// Copies without reading the destination into the cache first, which a copy to memory that is not read soon need not do.
void tandem_stream(void* to, const void* from, int64_t bytes) {
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
#if defined(__AVX512F__) || defined(__AVX2__)
  constexpr int64_t LINE = 64;
  const int64_t before = (LINE - static_cast<int64_t>(reinterpret_cast<uintptr_t>(target) % LINE)) % LINE;
  if (bytes >= before + LINE) {
    std::memcpy(target, source, static_cast<size_t>(before));
    source += before;
    target += before;
    bytes -= before;
    for (; bytes >= LINE; source += LINE, target += LINE, bytes -= LINE) {
#if defined(__AVX512F__)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
#else
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + LINE / 2));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target), low);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(target + LINE / 2), high);
#endif
    }
    _mm_sfence();
  }
#endif
  std::memcpy(target, source, static_cast<size_t>(bytes));
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
