#include "pool.h"

#include <chrono>
#include <utility>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace {

// How long a thread spins, in microseconds, before it sleeps. It never yields: on a busy machine a thread that yields
// comes back a time slice later, where one that sleeps is let in as soon as it is woken.
constexpr int64_t kSpinInCall = 250;         // at a barrier; waking takes about half of that
constexpr int64_t kSpinBetweenCalls = 1000;  // what a server does between two steps takes less
// A look at the clock that comes so late means that others want the processor: then sleep at once.
constexpr int64_t kPreempted = 100;
// A call whose threads slept at barriers for a larger share of it than one in so many was crowded: fewer are faster then.
constexpr int64_t kCrowdedShare = 3;
// Calls with fewer threads before all are tried again: from, to; doubled each time that it is still crowded.
constexpr int64_t kFewest = 4, kMost = 64;
// Threads of a call in the number that announces it; 0 of them means: end.
constexpr int kThreadBits = 16;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

int64_t microseconds() {
  using namespace std::chrono;
  return duration_cast<std::chrono::microseconds>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

namespace hp {

// The sleeper counts itself, then looks at the number; this thread moves the number, then looks at the count. Both are
// sequentially consistent, so at least one sees the other; the lock makes sure that the sleeper already waits.
void Signal::set(uint64_t value) {
  value_.store(value);
  if (asleep_.load() == 0) return;
  { std::lock_guard<std::mutex> lock(mutex_); }
  moved_.notify_all();
}

int64_t Signal::wait(uint64_t seen, int64_t spin_microseconds) {
  for (int k = 0; k < 100; k++) {
    if (now() != seen) return 0;
    relax();
  }
  const int64_t end = microseconds() + spin_microseconds;
  for (int64_t time = end - spin_microseconds, before = time; time < end && time - before < kPreempted;) {
    for (int k = 0; k < 20; k++) {
      if (now() != seen) return 0;
      relax();
    }
    before = time;
    time = microseconds();
  }
  return sleep(seen);
}

int64_t Signal::sleep(uint64_t seen) {
  const int64_t start = microseconds();
  std::unique_lock<std::mutex> lock(mutex_);
  asleep_.fetch_add(1);
  moved_.wait(lock, [&] { return value_.load() != seen; });
  asleep_.fetch_sub(1);
  return microseconds() - start;
}

char *Worker::scratch(std::size_t bytes) const { return static_cast<hp_pool *>(impl)->scratch(thread, bytes); }
char *Worker::shared_scratch(std::size_t bytes) const {
  return static_cast<hp_pool *>(impl)->shared_scratch(thread, bytes);
}
void Worker::barrier() const { static_cast<hp_pool *>(impl)->barrier(); }
WeightMemory &Worker::weight_memory() const { return static_cast<hp_pool *>(impl)->weight_memory(); }
int64_t Worker::next_work() const { return static_cast<hp_pool *>(impl)->next_work(); }
void Worker::reset_work() const { static_cast<hp_pool *>(impl)->reset_work(); }

}  // namespace hp

char *hp_pool::Buffer::start() const {
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  return reinterpret_cast<char *>((address + 63) & ~std::uintptr_t{63});
}

char *hp_pool::Buffer::at_least(std::size_t bytes) {
  if (bytes > size) {
    memory.reset();
    size = (bytes + bytes / 2 + 4095) & ~std::size_t{4095};
    memory.reset(new char[size + 64]);
  }
  return start();
}

hp_pool::hp_pool(int threads, const int32_t *cpus) : threads_(threads), seats_(threads), own_(threads) {
  if (cpus) cpus_.assign(cpus, cpus + threads);
  try {
    for (int thread = 1; thread < threads_; thread++) others_.emplace_back([this, thread] { serve(thread); });
  } catch (...) {  // no more threads to be had: the ones there are must end before the pool does
    stop();
    throw;
  }
}

hp_pool::~hp_pool() { stop(); }

void hp_pool::stop() {
  calls_.set(++number_ << kThreadBits);
  for (auto &other : others_) other.join();
}

void hp_pool::pin(int thread) {
#if defined(__linux__)
  if (cpus_.empty() || cpus_[thread] < 0 || cpus_[thread] >= CPU_SETSIZE) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpus_[thread], &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
  (void)thread;
#endif
}

// For the caller, before a call. Threads that were never called have not read their entry of cpus_ yet.
void hp_pool::keep_apart() {
#if defined(__linux__)
  const int here = sched_getcpu();
  for (int thread = 1; thread < threads_; thread++) {
    if (here < 0 || seats_[thread].cpu.load(std::memory_order_acquire) != here) continue;
    cpu_set_t set;
    if (pthread_getaffinity_np(pthread_self(), sizeof set, &set)) return;
    if (!cpus_.empty()) {
      const int32_t free = cpus_[0];  // nobody is pinned to the caller's entry
      if (cpus_[thread] != here || free == here || free < 0 || free >= CPU_SETSIZE || !CPU_ISSET(free, &set)) continue;
      CPU_ZERO(&set);
      CPU_SET(free, &set);
      std::swap(cpus_[0], cpus_[thread]);
    } else {
      CPU_CLR(here, &set);
      if (!CPU_COUNT(&set)) return;
    }
    pthread_setaffinity_np(others_[thread - 1].native_handle(), sizeof set, &set);
    seats_[thread].cpu.store(-1, std::memory_order_relaxed);
  }
#endif
}

// A thread that is left out of a call may sleep through it; one that takes part cannot miss the next: nobody starts it before
// all have met.
void hp_pool::serve(int thread) {
  pin(thread);
  bool spin = true;
  for (uint64_t seen = 0;;) {
    calls_.wait(seen, spin ? kSpinBetweenCalls : 0);
    seen = calls_.now();
    const int active = static_cast<int>(seen & ((1 << kThreadBits) - 1));
    if (!active) return;
    if (thread >= active) continue;
#if defined(__linux__)
    seats_[thread].cpu.store(sched_getcpu(), std::memory_order_release);
#endif
    spin = !alone_;
    job_(argument_, hp::Worker{thread, active, this});
    barrier();
  }
}

void hp_pool::run(void (*job)(void *, const hp::Worker &), void *argument, bool longer, bool alone) {
  std::lock_guard<std::mutex> lock(callers_);
  const bool fewer = !longer && calls_left_ > 0;
  if (fewer) calls_left_--;
  job_ = job;
  argument_ = argument;
  alone_ = alone;
  active_ = fewer ? (threads_ + 1) / 2 : threads_;
  work_.store(0, std::memory_order_relaxed);
  if (active_ == 1) return job(argument, hp::Worker{0, 1, this});
  keep_apart();
  lost_.store(0, std::memory_order_relaxed);
  const int64_t start = microseconds();
  calls_.set(++number_ << kThreadBits | static_cast<uint64_t>(active_));
  job(argument, hp::Worker{0, active_, this});
  barrier();
  if (!longer && !fewer) judge(microseconds() - start);
}

void hp_pool::judge(int64_t took) {
  const bool crowded = lost_.load(std::memory_order_relaxed) * kCrowdedShare > took * (active_ - 1);
  patience_ = !crowded ? 0 : patience_ ? (patience_ < kMost ? 2 * patience_ : kMost) : kFewest;
  calls_left_ = patience_;
}

void hp_pool::meet(bool reset_work) {
  if (active_ > 1) {
    const uint64_t seen = meetings_.now();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) != active_ - 1) {
      const int64_t slept = meetings_.wait(seen, kSpinInCall);
      if (slept) lost_.fetch_add(slept, std::memory_order_relaxed);
      return;
    }
    arrived_.store(0, std::memory_order_relaxed);
  }
  if (reset_work) work_.store(0, std::memory_order_relaxed);
  if (active_ > 1) meetings_.set(meetings_.now() + 1);
}

// Every thread sees the same size: it changes only while all of them are between the two barriers.
char *hp_pool::shared_scratch(int thread, std::size_t bytes) {
  if (bytes > shared_.size) {
    barrier();
    if (thread == 0) shared_.at_least(bytes);
    barrier();
  }
  return shared_.start();
}
