// Thread pool for parallel loops. Threads claim chunks of a loop from an atomic counter, so that no loop waits for a
// thread without a chunk and slow cores process fewer items. Chunks shrink towards the end of a loop (guided
// self-scheduling): memory is read in long runs, and threads end together. Idle threads spin for microseconds, then
// sleep.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t SHARE = 2;                    // a chunk has 1 / (SHARE * threads) of the items left
constexpr std::chrono::microseconds SPIN{50};   // longer than the gap between two loops of a forward pass

// Spins until ``ready``, for at most SPIN; returns whether it was.
template <class Ready>
bool spin(const Ready& ready) {
  for (auto end = Clock::now() + SPIN; Clock::now() < end;)
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  return false;
}

// Sleep until another thread makes a condition true.
class Sleep {
 public:
  template <class Ready>
  void until(const Ready& ready) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_++;
    changed_.wait(lock, ready);
    sleeping_--;
  }

  // Called after the condition may have changed.
  void wake() {
    if (sleeping_ == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<int> sleeping_{0};
};

// Serves one caller at a time.
class Pool {
 public:
  bool acquire() { return !used_.test_and_set(std::memory_order_acquire); }
  void release() { used_.clear(std::memory_order_release); }

  // Calls body(begin, end) for chunks of at least ``least`` of a loop's ``count`` items, in up to ``threads`` threads.
  template <class Body>
  void run(uint32_t count, uint32_t least, int threads, const Body& body) {
    start_helpers(threads - 1);
    next_.fetch_or(UINT32_MAX);  // no chunk may be claimed while the fields change
    call_ = [](const void* of, int64_t begin, int64_t end) { (*static_cast<const Body*>(of))(begin, end); };
    body_ = &body, count_ = count, least_ = least, threads_ = threads, done_ = 0;
    next_.fetch_add(1);  // the first item of the next loop
    idle_.wake();
    compute();
    auto done = [&] { return done_ == count; };
    if (!spin(done)) finished_.until(done);
  }

 private:
  // Processes chunks until none is left for this thread (0: the caller). A helper may arrive late from the loop of a
  // larger team.
  void compute(int thread = 0) {
    for (uint64_t next = next_;;) {
      auto call = call_.load();
      const void* body = body_;
      uint32_t begin = uint32_t(next), count = count_, threads = threads_;
      if (begin >= count || thread >= int(threads)) return;
      uint32_t share = SHARE * threads, size = (count - begin + share - 1) / share;
      uint32_t end = begin + std::min(std::max(size, uint32_t(least_)), count - begin);
      if (!next_.compare_exchange_strong(next, next + end - begin)) continue;  // success: all fields are this loop's
      call(body, begin, end);
      done_ += end - begin;
      finished_.wake();
      next = next_;
    }
  }

  void start_helpers(int count) {
    sigset_t all, before;
    if (started_ >= count) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals go to the program's own threads
    try {
      for (; started_ < count; started_++) std::thread(&Pool::help, this, started_ + 1).detach();
    } catch (const std::system_error&) {  // thread limit reached; the caller works alone
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  [[noreturn]] void help(int thread) {
    auto called = [&] { return uint32_t(next_) < count_ && thread < int(threads_); };
    for (;; compute(thread))
      if (!spin(called)) idle_.until(called);
  }

  std::atomic_flag used_ = ATOMIC_FLAG_INIT;
  int started_ = 0;  // helpers
  Sleep idle_, finished_;

  // The loop, in one cache line. Fields only change while no chunk is left, so whoever claims a chunk has read its
  // loop's fields.
  alignas(64) std::atomic<uint64_t> next_{0};  // loop number, and next item in the lower half
  std::atomic<void (*)(const void*, int64_t, int64_t)> call_{};
  std::atomic<const void*> body_{};
  std::atomic<uint32_t> count_{0}, least_{0}, threads_{0};
  alignas(64) std::atomic<uint32_t> done_{0};  // items
};

// Never deleted: its threads end with the process. A forked process starts its own threads.
std::atomic<Pool*> pool{new Pool};
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });

thread_local int team_size = 1;

// During its lifetime, loops of this thread use up to ``threads`` threads, unless another thread uses the pool.
class Team {
 public:
  explicit Team(int threads) : leads_(threads > 1 && team_size == 1 && pool_->acquire()) {
    if (leads_) team_size = threads;
  }
  ~Team() {
    if (leads_) team_size = 1, pool_->release();
  }
  Team(const Team&) = delete;

 private:
  Pool* pool_ = pool;
  bool leads_;
};

// Calls body(begin, end) for parts that cover a loop's items; all parts except the last have at least ``least`` items.
template <class Body>
void parts_of(int64_t count, int64_t least, const Body& body) {
  if (team_size == 1 || count <= least) return body(int64_t(0), count);
  pool.load()->run(uint32_t(count), uint32_t(least), team_size, body);
}

// Calls body(item) for all items of a loop; ``cost``: cost of an item, in features of a row.
template <class Body>
void each(int64_t count, int64_t cost, const Body& body) {
  constexpr int64_t worth = 4096;  // minimum cost of a part
  parts_of(count, (worth + cost - 1) / cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) body(i);
  });
}

}  // namespace
