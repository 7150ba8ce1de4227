// The thread pool: threads spin while work is near, and sleep when it is not.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels.h"
#include "weight.h"

namespace hp {

// A number that threads wait for to change. One thread at a time changes it.
class Signal {
 public:
  uint64_t now() const { return value_.load(std::memory_order_acquire); }
  // Everything written before is seen by those who wait.
  void set(uint64_t value);
  // Return once the number is no longer `seen`: spin for a while, then sleep. Microseconds slept.
  int64_t wait(uint64_t seen, int64_t spin_microseconds);

 private:
  int64_t sleep(uint64_t seen);

  alignas(64) std::atomic<uint64_t> value_{0};
  std::atomic<uint32_t> asleep_{0};
  std::mutex mutex_;
  std::condition_variable moved_;
};

}  // namespace hp

// Any thread may call `run`; calls wait for each other. While others want the processors, short calls have fewer threads:
// one that waits for its turn there would hold up the rest at every barrier, for milliseconds each time. cpus[thread] is
// the processor that a thread is pinned to; the caller's own thread is left alone, because what it starts would inherit a
// pinning. A thread that was last seen on the caller's processor is sent to another one before the call: the system may
// leave two that wake each other on one processor for good, next to an idle one.
struct hp_pool {
 public:
  hp_pool(int threads, const int32_t *cpus);
  ~hp_pool();

  int threads() const { return threads_; }
  // Run job(worker) on every thread, the caller's being number 0; returns when all are done. `longer`: whether the stretches
  // between its barriers are long, as a prompt's are: such calls always have all threads. `alone`: the next call is not near,
  // and others want the processors until then, so that threads sleep right after it.
  void run(void (*job)(void *, const hp::Worker &), void *argument, bool longer, bool alone = false);

  // For jobs; each is called by every thread.
  void barrier() { meet(false); }
  void reset_work() { meet(true); }
  char *scratch(int thread, std::size_t bytes) { return own_[thread].at_least(bytes); }
  char *shared_scratch(int thread, std::size_t bytes);
  // For jobs; called by one thread.
  hp::WeightMemory &weight_memory() { return weight_memory_; }
  // For jobs; called by whoever wants more.
  int64_t next_work() { return work_.fetch_add(1, std::memory_order_relaxed); }

 private:
  struct alignas(64) Buffer {
    std::unique_ptr<char[]> memory;
    std::size_t size = 0;
    char *at_least(std::size_t bytes);
    char *start() const;
  };
  struct alignas(64) Seat {
    std::atomic<int> cpu{-1};  // where the thread worked last; -1: not yet
  };

  void serve(int thread);
  void pin(int thread);
  void keep_apart();
  void meet(bool reset_work);
  void stop();
  void judge(int64_t took);

  const int threads_;
  std::vector<int32_t> cpus_;
  std::vector<std::thread> others_;
  std::vector<Seat> seats_;
  std::vector<Buffer> own_;
  Buffer shared_;
  hp::WeightMemory weight_memory_;
  std::mutex callers_;
  void (*job_)(void *, const hp::Worker &) = nullptr;  // NULL: end
  void *argument_ = nullptr;
  int active_ = 1;                           // threads of this call
  int64_t calls_left_ = 0;                   // calls until all threads are tried again
  int64_t patience_ = 0;                     // how many it will be the next time
  bool alone_ = false;                       // the call is
  uint64_t number_ = 0;                      // of the call
  hp::Signal calls_;                         // number and threads of a call, see `announce`
  hp::Signal meetings_;                      // barriers passed
  std::atomic<int64_t> lost_{0};             // microseconds that threads slept at barriers of this call
  alignas(64) std::atomic<int> arrived_{0};  // threads at the barrier
  alignas(64) std::atomic<int64_t> work_{0};
};
