// The layout of the key-value cache, as `tandem/kernels/api.py` lays it down.
#pragma once

#include <cstdint>

constexpr int64_t BLOCK_TOKENS = 16;  // keys[blocks, hkv, size, 16], values[blocks, hkv, 16, size]
