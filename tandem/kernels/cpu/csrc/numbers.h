// Sizes rounded up, and floats as their bits.
#pragma once

#include <cstdint>
#include <cstring>

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
