// What a kernel gets, and how variants of the same source are told apart.
//
// Files under kernels/ are compiled once per variant (baseline, avx2, avx512 ...), with HP_VARIANT naming it. Everything in
// them lives in namespace hp::HP_VARIANT, so that no inline function of one variant can be linked into another.
#pragma once

#include <atomic>
#include <cstdint>

#include "hp.h"

namespace hp {

class WeightMemory;

// One thread's view of one call. All threads of the pool enter the kernel together.
struct Worker {
  int thread;   // 0 .. threads - 1
  int threads;  // threads in this call
  void *impl;   // the pool
  char *scratch(std::size_t bytes) const;         // this thread's own memory, kept between calls; contents undefined
  char *shared_scratch(std::size_t bytes) const;  // one for all threads (call it on each; all get the same); undefined
  void barrier() const;                           // wait for all threads of the call
  WeightMemory &weight_memory() const;            // of the pool's weights, for one thread at a time
  // The next piece of work, 0, 1, 2 ... handed out to whoever asks; `reset_work` (all threads, with its barrier) restarts it.
  int64_t next_work() const;
  void reset_work() const;
};

using Kernel = void (*)(const hp_op &op, int64_t rows, const hp_batch *batch, const Worker &worker);

struct KernelTable {
  const char *variant = "";
  Kernel run[HP_CODES] = {};
  // gemm.cpp
  hp_weight *(*weight_new)(const Worker *, const hp_matrix &, bool exact) = nullptr;
};

// [begin, end) of `count` items for one thread, in multiples of `unit`.
inline void share(int64_t count, int64_t unit, const Worker &w, int64_t &begin, int64_t &end) {
  const int64_t units = (count + unit - 1) / unit;
  begin = units * w.thread / w.threads * unit;
  end = units * (w.thread + 1) / w.threads * unit;
  if (begin > count) begin = count;
  if (end > count) end = count;
}

}  // namespace hp

#define HP_JOIN2(a, b) a##b
#define HP_JOIN(a, b) HP_JOIN2(a, b)
#define HP_BEGIN namespace hp { namespace HP_VARIANT {
#define HP_END } }

#ifdef HP_VARIANT
HP_BEGIN
void add_pointwise(KernelTable &);
void add_gemm(KernelTable &);
void add_attention(KernelTable &);
void add_sampling(KernelTable &);
void add_state(KernelTable &);
void add_ceiling(KernelTable &);
HP_END
#endif
