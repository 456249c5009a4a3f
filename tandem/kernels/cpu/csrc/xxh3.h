// XXH3 with 128 bits, seed 0 and the default secret, of more than 240 bytes: for kernels that have the bytes in registers or in the first-level cache
// anyway. After xxhash_spec.md of xxHash 0.8; tests compare it with the library.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#include "vec.h"

namespace xxh3 {

constexpr int64_t STRIPE = 64;         // bytes
constexpr int64_t BLOCK_STRIPES = 16;  // (192 - 64) / 8: each stripe of a block starts 8 bytes further in the secret

alignas(64) constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

constexpr uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu, PRIME64_3 = 0x165667B19E3779F9u;
constexpr uint64_t PRIME64_4 = 0x85EBCA77C2B2AE63u, PRIME64_5 = 0x27D4EB2F165667C5u;

INLINE uint64_t word(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// One stripe, or the accumulators: eight words.
#if defined(__AVX512F__)
struct Words {
  __m512i v;
};
INLINE Words load_words(const void* at) { return {_mm512_loadu_si512(at)}; }
INLINE void stream_words(void* at, Words a) { _mm512_stream_si512(reinterpret_cast<__m512i*>(at), a.v); }
INLINE void store_words(void* at, Words a) { _mm512_storeu_si512(at, a.v); }
INLINE void mix(Words& sums, Words data, const uint8_t* secret) {
  const __m512i key = _mm512_xor_si512(data.v, _mm512_loadu_si512(secret));
  const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
  sums.v = _mm512_add_epi64(sums.v, _mm512_add_epi64(product, _mm512_shuffle_epi32(data.v, _MM_PERM_BADC)));
}
INLINE void scramble(Words& sums, const uint8_t* secret) {
  const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sums.v, _mm512_srli_epi64(sums.v, 47)), _mm512_loadu_si512(secret));
  const __m512i prime = _mm512_set1_epi32(static_cast<int>(PRIME32_1));
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
  sums.v = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}
#elif defined(__AVX2__)
struct Words {
  __m256i a, b;
};
INLINE Words load_words(const void* at) {
  const __m256i* from = static_cast<const __m256i*>(at);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
INLINE void stream_words(void* at, Words w) {
  _mm256_stream_si256(static_cast<__m256i*>(at), w.a);
  _mm256_stream_si256(static_cast<__m256i*>(at) + 1, w.b);
}
INLINE void store_words(void* at, Words w) {
  _mm256_storeu_si256(static_cast<__m256i*>(at), w.a);
  _mm256_storeu_si256(static_cast<__m256i*>(at) + 1, w.b);
}
INLINE __m256i mix_half(__m256i sums, __m256i data, __m256i secret) {
  const __m256i key = _mm256_xor_si256(data, secret);
  const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  return _mm256_add_epi64(sums, _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4e)));
}
INLINE void mix(Words& sums, Words data, const uint8_t* secret) {
  const Words key = load_words(secret);
  sums = {mix_half(sums.a, data.a, key.a), mix_half(sums.b, data.b, key.b)};
}
INLINE __m256i scramble_half(__m256i sums, __m256i secret) {
  const __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), secret);
  const __m256i prime = _mm256_set1_epi32(static_cast<int>(PRIME32_1));
  const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
  return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}
INLINE void scramble(Words& sums, const uint8_t* secret) {
  const Words key = load_words(secret);
  sums = {scramble_half(sums.a, key.a), scramble_half(sums.b, key.b)};
}
#else
struct Words {
  uint64_t x[8];
};
INLINE Words load_words(const void* at) {
  Words out;
  std::memcpy(out.x, at, sizeof out.x);
  return out;
}
INLINE void store_words(void* at, Words w) { std::memcpy(at, w.x, sizeof w.x); }
INLINE void stream_words(void* at, Words w) { store_words(at, w); }
INLINE void mix(Words& sums, Words data, const uint8_t* secret) {
  for (int i = 0; i < 8; ++i) {
    const uint64_t key = data.x[i] ^ word(secret + 8 * i);
    sums.x[i ^ 1] += data.x[i];
    sums.x[i] += (key & 0xFFFFFFFFu) * (key >> 32);
  }
}
INLINE void scramble(Words& sums, const uint8_t* secret) {
  for (int i = 0; i < 8; ++i) sums.x[i] = (sums.x[i] ^ (sums.x[i] >> 47) ^ word(secret + 8 * i)) * PRIME32_1;
}
#endif

// To be called after the last `stream_words`, before another thread may read what was written.
INLINE void end_of_stream() {
#if defined(__AVX512F__) || defined(__AVX2__)
  _mm_sfence();
#endif
}

class Digest {
 public:
  // `bytes`: of everything that will be digested.
  explicit Digest(int64_t bytes) : bytes_(bytes), before_last_((bytes - 1) / STRIPE) {
    const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    sums_ = load_words(first);
  }

  // How many stripes are added before the one of the last 64 bytes, which may overlap the one before it.
  int64_t before_last() const { return before_last_; }

  // Adds the next `count` stripes, all before the last. `next(i)` returns the i-th of them, and is called once for each, in order.
  template <typename Next>
  inline __attribute__((always_inline)) void add(int64_t count, Next next) {
    Words sums = sums_;
    int64_t place = at_ % BLOCK_STRIPES;
    at_ += count;
    for (int64_t i = 0; i < count;) {
      if (place == 0 && count - i >= BLOCK_STRIPES) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < BLOCK_STRIPES; ++j) mix(sums, next(i + j), SECRET + 8 * j);
        i += BLOCK_STRIPES;
        scramble(sums, SECRET + 128);
        continue;
      }
      mix(sums, next(i++), SECRET + 8 * place);
      place = (place + 1) % BLOCK_STRIPES;
      if (place == 0) scramble(sums, SECRET + 128);
    }
    sums_ = sums;
  }

  // Adds the last 64 bytes, after all stripes before them, and writes the digest in its canonical form: the high half first, big-endian.
  void finish(Words last, uint8_t out[16]) {
    mix(sums_, last, SECRET + 121);
    uint8_t sums[STRIPE];
    store_words(sums, sums_);
    const uint64_t length = static_cast<uint64_t>(bytes_);
    const uint64_t low = merged(sums, SECRET + 11, length * PRIME64_1), high = merged(sums, SECRET + 117, ~(length * PRIME64_2));
    for (int i = 0; i < 8; ++i) {
      out[i] = static_cast<uint8_t>(high >> (56 - 8 * i));
      out[8 + i] = static_cast<uint8_t>(low >> (56 - 8 * i));
    }
  }

 private:
  static uint64_t merged(const uint8_t* sums, const uint8_t* secret, uint64_t start) {
    for (int i = 0; i < STRIPE; i += 16) {
      const unsigned __int128 product = static_cast<unsigned __int128>(word(sums + i) ^ word(secret + i)) * (word(sums + i + 8) ^ word(secret + i + 8));
      start += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    start = (start ^ (start >> 37)) * 0x165667919E3779F9u;
    return start ^ (start >> 32);
  }

  int64_t bytes_, before_last_, at_ = 0;
  Words sums_;
};

}  // namespace xxh3
