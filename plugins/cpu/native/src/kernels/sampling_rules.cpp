// What changes logits before a draw, in place: sparse biases and penalties. Floats go through the same operations in the
// same order as in the reference, so that the logits are equal bit by bit.
//
//  HP_BIAS       p0 logits [rows, i0], p1 rows int64[n], p2 tokens int64[n], p3 values f32[n], p4 n as int64* or NULL (then
//                i2); i0 vocab, i1 stride, i2 n. Entries of one place add up in their order; those outside the logits are
//                left out.
//  HP_PENALTIES  p0 logits [rows, i0], p1 history int64 [rows, i3] (prompt, then output; what lies outside the vocabulary is
//                left out), p2 prompt lengths int64[rows], p3 presence f32[rows], p4 frequency f32[rows],
//                p5 repetition f32[rows], p6 length as int64* or NULL (then i2); i0 vocab, i1 stride, i2 length of the
//                histories, i3 their stride (0: the length).
#include "sampling.h"

HP_BEGIN

static void bias(const hp_op &op, int64_t rows, const hp_batch *, const Worker &worker) {
  float *logits = (float *)op.p[0];
  const int64_t *at = (const int64_t *)op.p[1], *tokens = (const int64_t *)op.p[2];
  const float *values = (const float *)op.p[3];
  const int64_t count = op.p[4] ? *(const int64_t *)op.p[4] : op.i[2];
  for (int64_t k = 0; k < count; k++) {  // every thread takes the entries of its rows
    if (at[k] < 0 || at[k] >= rows || at[k] % worker.threads != worker.thread) continue;
    if (tokens[k] >= 0 && tokens[k] < op.i[0]) logits[at[k] * op.i[1] + tokens[k]] += values[k];
  }
}

namespace {

// Tokens of one history and how often each was generated: a hash table with room for twice as many.
struct Counts {
  int32_t *tokens;  // -1 where free
  int32_t *generated;
  int64_t size;  // a power of two

  int64_t place(int32_t token) const {
    int64_t at = (uint32_t)token * 0x9E3779B1u & (size - 1);
    while (tokens[at] != token && tokens[at] >= 0) at = (at + 1) & (size - 1);
    return at;
  }
};

void penalize(float *x, int64_t vocab, const int64_t *history, int64_t length, int64_t prompt, float presence,
              float frequency, float repetition, const Counts &counts) {
  std::memset(counts.tokens, 255, counts.size * sizeof(int32_t));
  for (int64_t k = 0; k < length; k++) {
    if (history[k] < 0 || history[k] >= vocab) continue;
    const int64_t at = counts.place((int32_t)history[k]);
    if (counts.tokens[at] < 0) {
      counts.tokens[at] = (int32_t)history[k];
      counts.generated[at] = 0;
    }
    counts.generated[at] += k >= prompt;
  }
  for (int64_t at = 0; at < counts.size; at++) {
    if (counts.tokens[at] < 0) continue;
    float &logit = x[counts.tokens[at]];
    float v = logit > 0 ? logit / repetition : logit * repetition;
    v = v - frequency * (float)counts.generated[at];
    logit = v - presence * (float)(counts.generated[at] > 0);
  }
}

}  // namespace

static void penalties(const hp_op &op, int64_t rows, const hp_batch *, const Worker &worker) {
  const int64_t length = op.p[6] ? *(const int64_t *)op.p[6] : op.i[2], stride = op.i[3] ? op.i[3] : op.i[2];
  const float *presence = (const float *)op.p[3], *frequency = (const float *)op.p[4];
  const float *repetition = (const float *)op.p[5];
  int64_t size = 16;
  while (size < 2 * length) size *= 2;
  char *memory = worker.scratch(size * 2 * sizeof(int32_t));
  const Counts counts{(int32_t *)memory, (int32_t *)memory + size, size};
  for (int64_t row = worker.next_work(); row < rows; row = worker.next_work()) {
    if (presence[row] == 0 && frequency[row] == 0 && repetition[row] == 1) continue;
    penalize((float *)op.p[0] + row * op.i[1], op.i[0], (const int64_t *)op.p[1] + row * stride, length,
             ((const int64_t *)op.p[2])[row], presence[row], frequency[row], repetition[row], counts);
  }
}

void add_logit_rules(KernelTable &table) {
  table.run[HP_BIAS] = bias;
  table.run[HP_PENALTIES] = penalties;
}

HP_END
