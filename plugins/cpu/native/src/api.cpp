// The exported functions: choosing a variant, playing ops.
#include <chrono>
#include <cstring>
#include <string>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "hp.h"
#include "kernels.h"
#include "pool.h"

// Defined by CMake: HP_EACH_VARIANT(X) calls X(name) for every variant that was compiled, best first.
#include "variants.h"

namespace hp {

#define HP_DECLARE(name) \
  namespace name {       \
  KernelTable make_table(); \
  }
HP_EACH_VARIANT(HP_DECLARE)
#undef HP_DECLARE

namespace {

#if defined(__aarch64__) && defined(__linux__)
// Bits of the kernel's auxiliary vector (asm/hwcap.h), spelled out: old headers lack some.
bool aarch64_supports(const std::string &variant) {
  const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  const bool dotprod = (first >> 20 & 1) && (first >> 10 & 1);  // asimddp, asimdhp
  if (variant == "dotprod") return dotprod;
  return variant == "i8mm" && dotprod && (second >> 13 & 1);
}
#endif

bool runs_here(const char *name) {
  const std::string variant = name;
  if (variant == "baseline") return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (variant == "avx2") return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (variant == "avx512") return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (variant == "avx512vnni") return vnni;
  if (variant == "avx512bf16") return vnni && __builtin_cpu_supports("avx512bf16");
#elif defined(__aarch64__) && defined(__linux__)
  return aarch64_supports(variant);
#endif
  return false;
}

const KernelTable *find(const char *wanted) {
#define HP_FIND(name)                                                                    \
  if ((!wanted || !std::strcmp(wanted, #name)) && runs_here(#name)) {                    \
    static const KernelTable table = name::make_table();                                 \
    return &table;                                                                       \
  }
  HP_EACH_VARIANT(HP_FIND)
#undef HP_FIND
  return nullptr;
}

// Steps of so many tokens are a few microseconds of work between barriers.
constexpr int64_t kFewTokens = 8;

const KernelTable *current = nullptr;
double spent[HP_CODES];

const KernelTable *chosen() {
  if (!current) current = find(nullptr);
  return current;
}

struct Call {
  const hp_op *ops;
  int64_t count;
  const hp_batch *batch;
  const KernelTable *table;
  std::chrono::steady_clock::time_point done;  // when thread 0 was
};

int64_t rows_of(const hp_op &op, const hp_batch *batch) {
  if (op.rows_of == HP_ROWS_FIXED) return op.rows;
  return op.rows_of == HP_ROWS_TOKENS ? batch->tokens : batch->draws;
}

void play(void *argument, const Worker &worker) {
  using Clock = std::chrono::steady_clock;
  Call &call = *static_cast<Call *>(argument);
  Clock::time_point before;
  if (worker.thread == 0) before = Clock::now();
  for (int64_t k = 0; k < call.count; k++) {
    const hp_op &op = call.ops[k];
    call.table->run[op.code](op, rows_of(op, call.batch), call.batch, worker);
    if (k + 1 < call.count) worker.reset_work();
    if (worker.thread == 0) {
      const Clock::time_point now = Clock::now();
      spent[op.code] += std::chrono::duration<double>(now - before).count();
      before = now;
    }
  }
  if (worker.thread == 0) call.done = before;
}

}  // namespace
}  // namespace hp

extern "C" {

int32_t hp_abi(void) { return HP_ABI; }

const char *hp_variants(void) {
  static const std::string text = [] {
    std::string out;
#define HP_NAME(name) out += std::string(#name) + (hp::runs_here(#name) ? " 1\n" : " 0\n");
    HP_EACH_VARIANT(HP_NAME)
#undef HP_NAME
    return out;
  }();
  return text.c_str();
}

const char *hp_use(const char *variant) {
  const hp::KernelTable *table = hp::find(variant);
  if (!table) return nullptr;
  hp::current = table;
  return table->variant;
}

hp_pool *hp_pool_new(int32_t threads, const int32_t *cpus) {
  try {
    return threads < 1 ? nullptr : new hp_pool(threads, cpus);
  } catch (...) {
    return nullptr;
  }
}

void hp_pool_free(hp_pool *pool) { delete pool; }

int32_t hp_pool_threads(const hp_pool *pool) { return pool->threads(); }

int64_t hp_run(hp_pool *pool, const hp_op *ops, int64_t count, const hp_batch *batch) {
  const hp::KernelTable *table = hp::chosen();
  for (int64_t k = 0; k < count; k++)
    if (ops[k].code <= 0 || ops[k].code >= HP_CODES || !table->run[ops[k].code]) return k + 1;
  if (!count) return 0;
  hp::Call call{ops, count, batch, table, {}};
  pool->run(hp::play, &call, !batch || batch->tokens > hp::kFewTokens);
  // The other threads may have been at the last op for longer than thread 0.
  hp::spent[ops[count - 1].code] += std::chrono::duration<double>(std::chrono::steady_clock::now() - call.done).count();
  return 0;
}

void hp_profile(double *seconds) {
  for (int code = 0; code < HP_CODES; code++) {
    seconds[code] = hp::spent[code];
    hp::spent[code] = 0;
  }
}

hp_weight *hp_weight_new(hp_pool *pool, const hp_matrix *matrix, int32_t exact) {
  struct Job {
    const hp_matrix *matrix;
    bool exact;
    const hp::KernelTable *table;
    hp_weight *made;
  } job{matrix, exact != 0, hp::chosen(), nullptr};
  if (!job.table->weight_new) return nullptr;
  pool->run(
      [](void *argument, const hp::Worker &worker) {
        Job &job = *static_cast<Job *>(argument);
        hp_weight *made = job.table->weight_new(&worker, *job.matrix, job.exact);
        if (worker.thread == 0) job.made = made;
      },
      &job, true, true);  // whoever reads the next weight wants the processors
  return job.made;
}

}  // extern "C"
