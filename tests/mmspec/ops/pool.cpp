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

// Whether Ctrl-C may interrupt this thread.
bool is_interrupted() {
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  return !sigismember(&blocked, SIGINT);
}

// Computes a loop of two threads, of which the helper must take a chunk; both then call ``held``. Signals reach the
// caller alone.
template <class Held>
void with_helper(const Held& held) {
  auto caller = std::this_thread::get_id();
  std::atomic<bool> taken{false};
  loop(2, [&](int64_t items) {
    bool helper = std::this_thread::get_id() != caller;
    if (helper) taken = true;
    if (helper == is_interrupted()) std::fprintf(stderr, "signals must reach the caller alone\n"), std::exit(1);
    for (int i = 0; !taken; i++) {
      if (i == 10000) std::fprintf(stderr, "no helper came\n"), std::exit(1);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    held(helper, items);
  });
}

// A helper that is stopped holds up its chunk alone: it goes on once all others are computed, which are most of the loop.
void stopped_helper() {
  for (int i = 0; i < 20; i++) {
    std::atomic<int64_t> left{ITEMS};
    with_helper([&](bool helper, int64_t items) {
      if (helper && items > ITEMS / 4) std::exit(1);
      left -= items;
      while (helper && left > 0) std::this_thread::yield();
    });
  }
}

// Chunks shrink from a quarter of a loop of two threads to ``least`` items, whatever thread takes them.
void chunks() {
  for (int64_t least : {1, 30}) {
    std::mutex mutex;
    std::set<std::pair<int64_t, int64_t>> found;  // first item, items
    {
      Team team(2);
      parts_of(ITEMS, least, [&](int64_t begin, int64_t end) {
        std::lock_guard<std::mutex> lock(mutex);
        found.insert({begin, end - begin});
      });
    }
    int64_t before = ITEMS / 4, last = found.rbegin()->first;
    if (found.begin()->second != before) std::exit(1);
    for (auto [begin, items] : found) {
      if (items > before || (items < least && begin != last)) std::exit(1);
      before = items;
    }
    if (before > least) std::exit(1);
  }
}

// A helper that was late once, or several times, takes part in the next loop.
void late_helper() {
  for (int i = 0; i < 10; i++)
    with_helper([](bool helper, int64_t) {
      if (helper) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    });
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
  if (name == "chunks") chunks();
  if (name == "other teams") other_teams();
  if (name == "late helper") late_helper();
  if (name == "no helpers") no_helpers();
  if (name == "forked") forked();
  if (name == "several callers") several_callers();
  if (name == "loops") loops(4, 100000);
}
