// Threads and working memory. Nothing here can change a result: it only says who computes it, and where.
#pragma once

#include <omp.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

// Threads worth waking for `work` multiply-adds (or as many bytes moved): one below about twenty microseconds' worth.
inline int threads_for(int64_t work) {
  constexpr int64_t WORTH_A_WAKE_UP = 1 << 20;
  return work < WORTH_A_WAKE_UP || omp_in_parallel() ? 1 : omp_get_max_threads();
}

// Floats on a cache line, kept by their thread from call to call and only ever grown.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  float* floats(int64_t count) {
    if (count > capacity_) {
      std::free(data_);
      capacity_ = (count + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, static_cast<size_t>(capacity_) * sizeof(float)));
      if (data_ == nullptr) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t capacity_ = 0;
};
