// Threads that stay together for a whole call: one computes it and shares the tasks of its loops, the others wait for tasks without sleeping, as those of
// llama.cpp do between the operations of a graph. Sharing takes a fraction of a microsecond, where a parallel region of OpenMP takes several.
#pragma once

#include <sched.h>

#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "parallel.h"

class Team {
 public:
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // The team whose first thread this is, or null.
  static Team* own() { return own_; }

  // Runs call() on this thread, with a team of `threads`.
  template <typename Call>
  static void run(int threads, Call call) {
    Team team;
    Failure failure;
#pragma omp parallel num_threads(threads)
    {
      if (omp_get_thread_num() == 0) {
        team.size_ = omp_get_num_threads();
        own_ = &team;
        failure.guard(call);
        own_ = nullptr;
        team.has_ended_.store(true, std::memory_order_release);
      } else {
        team.follow();
      }
    }
    failure.raise();
  }

  int size() const { return size_; }

  // Runs body(task) for each of the tasks. A thread takes the next one when it is free, so none waits for a thread that does not run.
  template <typename Body>
  void share(int64_t tasks, Body body) {
    body_ = &body;
    call_ = [](void* of, int64_t task) { (*static_cast<Body*>(of))(task); };
    done_.store(0, std::memory_order_relaxed);
    const uint64_t turn = (open_.load(std::memory_order_relaxed) >> TASK_BITS) + 1;
    open_.store(turn << TASK_BITS | static_cast<uint64_t>(tasks), std::memory_order_release);
    while (take()) {
    }
    for (Waiting waiting; done_.load(std::memory_order_acquire) < tasks;) waiting.pause();
  }

 private:
  static constexpr int TASK_BITS = 32;

  class Waiting {
   public:
    void pause() {
      // A thread that waits for long leaves its core to others.
      if (++rounds_ % 1024 == 0) sched_yield();
#if defined(__x86_64__)
      _mm_pause();
#endif
    }

   private:
    unsigned rounds_ = 0;
  };

  Team() = default;

  void follow() {
    for (Waiting waiting; !has_ended_.load(std::memory_order_acquire);)
      if (!take()) waiting.pause();
  }

  // Computes one of the open tasks; false where there is none.
  bool take() {
    uint64_t open = open_.load(std::memory_order_acquire);
    do {
      if (open << TASK_BITS == 0) return false;
    } while (!open_.compare_exchange_weak(open, open - 1, std::memory_order_acquire));
    // Until this task is done no other loop begins.
    call_(body_, static_cast<int64_t>((open & ((uint64_t{1} << TASK_BITS) - 1)) - 1));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  static inline thread_local Team* own_ = nullptr;

  int size_ = 1;
  void* body_ = nullptr;
  void (*call_)(void*, int64_t) = nullptr;
  std::atomic<uint64_t> open_{0};  // the number of the loop, and how many of its tasks are not taken yet
  std::atomic<int64_t> done_{0};
  std::atomic<bool> has_ended_{false};
};

// As threads_for, for loops that run by `share`: a team shares less work too.
inline int sharing_threads_for(int64_t work) {
  constexpr int64_t WORTH_SHARING = 1 << 16;
  const Team* team = Team::own();
  return !team ? threads_for(work) : work < WORTH_SHARING ? 1 : team->size();
}

// Runs body(task) for each of the tasks, in any order, on the team or on `threads` of OpenMP that take `at_once` tasks at a time. Throws where an allocation
// failed.
template <typename Body>
void share(int threads, int64_t tasks, int64_t at_once, Body body) {
  Failure failure;
  if (threads == 1) {
    for (int64_t task = 0; task < tasks; ++task) failure.guard([&] { body(task); });
  } else if (Team* team = Team::own()) {
    team->share(tasks, [&](int64_t task) { failure.guard([&] { body(task); }); });
  } else {
#pragma omp parallel for schedule(dynamic, at_once) num_threads(threads)
    for (int64_t task = 0; task < tasks; ++task) failure.guard([&] { body(task); });
  }
  failure.raise();
}
