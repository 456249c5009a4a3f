// The rates of fused multiply-adds and of bf16 dot products in a loop over registers: two lines, GFLOP/s of each.
#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

template <typename Step>
double rate(Step step, double operations) {
  constexpr int CHAINS = 16;
  constexpr long ROUNDS = 4000000;
  double best = 0;
  for (int turn = 0; turn < 5; ++turn) {
    __m512 acc[CHAINS];
#pragma GCC unroll 16
    for (int i = 0; i < CHAINS; ++i) acc[i] = _mm512_setzero_ps();
    const auto began = std::chrono::steady_clock::now();
    for (long round = 0; round < ROUNDS; ++round) {
#pragma GCC unroll 16
      for (int i = 0; i < CHAINS; ++i) acc[i] = step(acc[i]);
      asm volatile("" : "+v"(acc[0]), "+v"(acc[1]), "+v"(acc[2]), "+v"(acc[3]), "+v"(acc[4]), "+v"(acc[5]), "+v"(acc[6]), "+v"(acc[7]));
      asm volatile("" : "+v"(acc[8]), "+v"(acc[9]), "+v"(acc[10]), "+v"(acc[11]), "+v"(acc[12]), "+v"(acc[13]), "+v"(acc[14]), "+v"(acc[15]));
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    best = std::max(best, ROUNDS * CHAINS * operations / seconds / 1e9);
  }
  return best;
}

int main() {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __m512i pairs = _mm512_set1_epi32(0x3f803f80);
  std::printf("%.1f\n", rate([&](__m512 a) { return _mm512_fmadd_ps(one, one, a); }, 32));
#ifdef __AVX512BF16__
  std::printf("%.1f\n", rate([&](__m512 a) { return _mm512_dpbf16_ps(a, (__m512bh)pairs, (__m512bh)pairs); }, 64));
#endif
}
