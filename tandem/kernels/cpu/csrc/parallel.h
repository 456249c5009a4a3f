// Threads and working memory. Nothing here can change a result: it only says who computes it, and where.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <new>
#include <type_traits>

#include "numbers.h"

// Threads worth waking for `work` multiply-adds (or as many bytes moved): one below about twenty microseconds' worth.
inline int threads_for(int64_t work) {
  constexpr int64_t WORTH_A_WAKE_UP = 1 << 20;
  return work < WORTH_A_WAKE_UP || omp_in_parallel() ? 1 : omp_get_max_threads();
}

constexpr int OUT_OF_MEMORY = -1;

// What a C function returns: `call`'s result (0 where it has none), or OUT_OF_MEMORY where an allocation failed.
template <typename Call>
int or_out_of_memory(Call call) noexcept {
  try {
    if constexpr (std::is_void_v<decltype(call())>) {
      call();
      return 0;
    } else {
      return call();
    }
  } catch (const std::exception&) {  // bad_alloc, or length_error where a size is absurd: nothing else is thrown here
    return OUT_OF_MEMORY;
  }
}

// Throws where `code`, which such a function returned, says that an allocation failed.
inline void allocated(int code) {
  if (code == OUT_OF_MEMORY) throw std::bad_alloc();
}

// Carries a failed allocation out of a parallel loop, which no exception may leave.
class Failure {
 public:
  template <typename Body>
  void guard(Body body) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      body();
    } catch (const std::exception&) {
      failed_.store(true, std::memory_order_relaxed);
    }
  }
  void raise() const {
    if (failed_.load()) throw std::bad_alloc();
  }

 private:
  std::atomic<bool> failed_{false};
};

// Calls run(i) for each i below `count` on the threads that `work` is worth, each thread's one behind the other. Throws where an allocation failed.
template <typename Run>
void each_row(int64_t count, int64_t work, Run run) {
  Failure failure;
  const int threads = threads_for(work);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < count; ++i) failure.guard([&] { run(i); });
  failure.raise();
}

// Calls run(g, first row, rows) for each group that has rows, the ones `bounds[g]` to `bounds[g + 1]`, of `work` multiply-adds a row: a group a thread, where
// no group is more than one thread's share; else all threads on one group after another. Throws where an allocation failed.
template <typename Run>
void each_group(const int64_t* bounds, int64_t groups, int64_t work, Run run) {
  Failure failure;
  int64_t busy = 0, most = 0;
  for (int64_t g = 0; g < groups; ++g) {
    busy += bounds[g + 1] > bounds[g];
    most = std::max(most, bounds[g + 1] - bounds[g]);
  }
  const int64_t total = bounds[groups] - bounds[0];
  const int threads = threads_for(total * work + busy * work);
  const bool apart = threads > 1 && busy >= 2 * threads && most * threads <= total;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (apart)
  for (int64_t g = 0; g < groups; ++g)
    failure.guard([&] {
      if (bounds[g + 1] > bounds[g]) run(g, bounds[g], bounds[g + 1] - bounds[g]);
    });
  failure.raise();
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
      capacity_ = round_up(count, 1024);
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

// Bytes of a panel that are asked for ahead of those that are multiplied: one row reads each once, and memory is what it waits for.
constexpr int64_t BYTES_AHEAD = 2048;
template <int64_t BYTES>
inline __attribute__((always_inline)) void ask_ahead(const uint8_t* p) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch(p + BYTES_AHEAD + i, 0, 3);
}
