// Loops of the pool whose helpers are kept from working: exit status 0 if each has computed every item once.

#include "../../../mmspec/ops/cpp/pool.h"

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

constexpr int64_t ITEMS = 1000;

// A loop whose body may block; a chunk that is computed twice, or never, ends the process.
template <class Before>
void loop(int threads, const Before& before, int64_t count = ITEMS) {
  std::vector<std::atomic<int>> computed(count);
  {
    Team team(threads);
    parts_of(count, 1, [&](int64_t begin, int64_t end) {
      before(end - begin);
      for (int64_t i = begin; i < end; i++) computed[i]++;
    });
  }
  for (auto& times : computed)
    if (times != 1) std::fprintf(stderr, "computed %d times\n", times.load()), std::exit(1);
}

void loops(int threads, int count) {
  for (int i = 0; i < count; i++) loop(threads, [](int64_t) {}, 2 + i % 40);  // of few chunks and of many
}

// A helper that is stopped holds up its chunk alone: it goes on once all others are computed, which are most of the loop.
void stopped_helper() {
  auto caller = std::this_thread::get_id();
  for (int held = 0; held < 20;) {
    std::atomic<int64_t> left{ITEMS};
    std::atomic<bool> taken{false};
    loop(2, [&](int64_t items) {
      if (std::this_thread::get_id() == caller) {
        // The first chunk waits for a helper to take one, for a while: the pool may rest.
        for (int i = 0; left == ITEMS && !taken && i < 100; i++) std::this_thread::sleep_for(REST / 50);
        left -= items;
        return;
      }
      if (items > ITEMS / 4) std::exit(1);
      taken = true, left -= items;
      while (left > 0) std::this_thread::yield();
    });
    held += taken;
  }
}

// Each loop has the threads of its team, not those that an earlier one has started; all of them in the end.
void other_teams() {
  for (int threads : {4, 2, 3, 1, 2})
    for (int full = 0; full < 5;) {
      std::mutex mutex;
      std::set<std::thread::id> team;
      loop(threads, [&](int64_t) {
        std::this_thread::sleep_for(std::chrono::microseconds(500));
        std::lock_guard<std::mutex> lock(mutex);
        team.insert(std::this_thread::get_id());
      });
      if (team.size() > size_t(threads)) std::fprintf(stderr, "%zu of %d\n", team.size(), threads), std::exit(1);
      full += team.size() == size_t(threads);
    }
}

// Each delay of a helper doubles the time in which the pool rests; after a long time without, it begins anew.
void rests() {
  Pool pool;
  auto rest_after = [&](Clock::duration delay) {
    pool.rest_if_late(Clock::now() - delay, MOST_REST);
    return pool.rest_;
  };
  constexpr auto none = Clock::duration::zero(), late = Clock::duration(2 * LATE * MOST_REST);
  auto begin = Clock::now();
  Clock::duration expected = REST;
  for (int i = 0; i < 10; i++, expected = std::min<Clock::duration>(2 * expected, MOST_REST))
    if (rest_after(late) != expected || pool.resting_until_ < begin + expected) std::exit(1);
  if (rest_after(none) != MOST_REST) std::exit(1);  // not long without
  pool.resting_until_ -= late;
  if (rest_after(none) != none || rest_after(late) != REST) std::exit(1);
}

// Helpers that cannot start.
void no_helpers() {
  rlimit none{0, 0};
  setrlimit(RLIMIT_NPROC, &none);
  if (setuid(65534) != 0) std::exit(77);  // root has no limit
  bool refused = false;
  try {
    std::thread([] {}).join();
  } catch (const std::system_error&) {
    refused = true;
  }
  if (!refused) std::exit(77);
  loops(3, 10);
}

// A child computes with helpers of its own, also after a fork in the middle of another thread's loop.
void forked() {
  loops(3, 10);
  std::atomic<bool> ended{false};
  std::thread other([&] {
    while (!ended) loops(3, 1);
  });
  for (int i = 0; i < 20; i++) {
    pid_t child = fork();
    if (child == 0) {
      auto caller = std::this_thread::get_id();
      std::atomic<bool> helped{false};
      for (int tries = 0; tries < 1000 && !helped; tries++)
        loop(3, [&](int64_t) {
          if (std::this_thread::get_id() != caller) helped = true;
          else std::this_thread::sleep_for(std::chrono::microseconds(100));
        });
      _exit(helped ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) std::exit(1);
  }
  ended = true;
  other.join();
}

// Several callers, of which one has the pool.
void several_callers() {
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; i++) callers.emplace_back([] { loops(3, 2000); });
  for (auto& caller : callers) caller.join();
}

int main(int, char** arguments) {
  std::string name = arguments[1];
  if (name == "stopped helper") stopped_helper();
  if (name == "other teams") other_teams();
  if (name == "rests") rests();
  if (name == "no helpers") no_helpers();
  if (name == "forked") forked();
  if (name == "several callers") several_callers();
  if (name == "loops") loops(4, 100000);
}
