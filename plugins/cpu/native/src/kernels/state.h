// Recurrent states in paged memory: where a request's state lies, and how it is read and written.
//
// A request's state is `elements` numbers at token 0 of the first page of its table; it counts as zero where nothing of the
// request was computed before this step. The kernels go token by token and round the state to the pool's dtype after each, so
// that a request's results do not depend on how it was cut into steps.
#pragma once

#include "../simd.h"

HP_BEGIN

struct Pool {
  char *memory;
  int64_t dtype, stride;  // elements between pages

  int64_t size() const { return dtype == HP_F32 ? 4 : 2; }
  char *at(int64_t page, int64_t offset) const { return memory + (page * stride + offset) * size(); }

  void read(const char *from, int64_t count, float *to) const {
    if (dtype == HP_F32) std::memcpy(to, from, count * sizeof(float));
    const uint16_t *half = (const uint16_t *)from;
    if (dtype == HP_F16)
      for (int64_t k = 0; k < count; k++) to[k] = half_to_float(half[k]);
    if (dtype == HP_BF16)
      for (int64_t k = 0; k < count; k++) to[k] = bf16_to_float(half[k]);
  }
  void write(const float *from, int64_t count, char *to) const {
    if (dtype == HP_F32) std::memcpy(to, from, count * sizeof(float));
    uint16_t *half = (uint16_t *)to;
    if (dtype == HP_F16)
      for (int64_t k = 0; k < count; k++) half[k] = float_to_half(from[k]);
    if (dtype == HP_BF16)
      for (int64_t k = 0; k < count; k++) half[k] = float_to_bf16(from[k]);
  }
  // What is left of numbers once they were stored; count is a multiple of W.
  void round(float *x, int64_t count) const {
    if (dtype == HP_F32) return;
    uint16_t room[W];
    for (int64_t k = 0; k < count; k += W) {
      if (dtype == HP_F16) {
        store_half(room, load(x + k));
        store(x + k, load_half(room));
      } else {
        store_bf16(room, load(x + k));
        store(x + k, load_bf16(room));
      }
    }
  }
};

// One request's part of the batch: tokens [begin, end).
struct Request {
  int64_t begin, end, page;
  bool starts;  // nothing computed before

  Request(const hp_batch &batch, int64_t index, int64_t group)
      : begin(batch.query_start[index]),
        end(batch.query_start[index + 1]),
        page(batch.groups[group].page_table[index * batch.groups[group].table_stride]),
        starts(batch.seq_lens[index] == batch.query_start[index + 1] - batch.query_start[index]) {}
};

static inline int64_t state_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t up_to_w(int64_t count) { return (count + W - 1) / W * W; }

// Zeros for the padding behind the batch's real tokens.
static inline void clear_padding(float *out, int64_t rows, int64_t stride, int64_t width, const hp_batch &batch,
                          const Worker &worker) {
  if (worker.thread) return;
  for (int64_t row = batch.query_start[batch.num_requests]; row < rows; row++)
    std::memset(out + row * stride, 0, width * sizeof(float));
}

void add_lora(KernelTable &);
void add_ssm_scan(KernelTable &);
void add_gated_delta(KernelTable &);

HP_END
