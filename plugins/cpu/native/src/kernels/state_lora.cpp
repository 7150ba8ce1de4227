// HP_LORA  p0 y [rows, i1] in and out, p1 x [rows, i0], p2 slots int64[rows], p3 a [i3, i2, i0], p4 b [i3, i1, i2];
//          i0 in_features, i1 out_features, i2 rank, i3 slots, i4 x stride, i5 y stride, i6 dtype of a and b (enum hp_dtype:
//          F32, F16, BF16).
// The contract is lora: y += b[slot] (a[slot] x); a slot outside [0, i3) leaves y as it is. First all a x, by (8 rows, 4 ranks),
// then all b of these, by (8 rows, 128 outputs): a weight that several rows of a piece want comes from memory once.
#include "state.h"

HP_BEGIN

namespace {

constexpr int64_t kRows = 8, kRanks = 4, kOutputs = 128;

template <int Dtype>
inline vf weights(const char *of, int64_t at) {
  if (Dtype == HP_F32) return load((const float *)of + at);
  return Dtype == HP_F16 ? load_half((const uint16_t *)of + at) : load_bf16((const uint16_t *)of + at);
}
template <int Dtype>
inline float weight(const char *of, int64_t at) {
  if (Dtype == HP_F32) return ((const float *)of)[at];
  return Dtype == HP_F16 ? half_to_float(((const uint16_t *)of)[at]) : bf16_to_float(((const uint16_t *)of)[at]);
}

template <int Dtype>
float dot(const char *of, int64_t at, const float *x, int64_t count) {
  vf sums[4] = {};
  int64_t k = 0;
  for (; k + 4 * W <= count; k += 4 * W)
    for (int j = 0; j < 4; j++) sums[j] = fma(weights<Dtype>(of, at + k + j * W), load(x + k + j * W), sums[j]);
  for (; k + W <= count; k += W) sums[0] = fma(weights<Dtype>(of, at + k), load(x + k), sums[0]);
  float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
  for (; k < count; k++) total += weight<Dtype>(of, at + k) * x[k];
  return total;
}

template <int Dtype>
void run(const hp_op &op, int64_t rows, const Worker &worker) {
  const int64_t in = op.i[0], out = op.i[1], rank = op.i[2], blocks = (rows + kRows - 1) / kRows;
  const int64_t *slots = (const int64_t *)op.p[2];
  const char *a = (const char *)op.p[3], *b = (const char *)op.p[4];
  float *inner = (float *)worker.shared_scratch(rows * rank * sizeof(float));
  const auto known = [&](int64_t row) { return slots[row] >= 0 && slots[row] < op.i[3]; };

  const int64_t ranks = (rank + kRanks - 1) / kRanks;
  for (int64_t item = worker.next_work(); item < blocks * ranks; item = worker.next_work()) {
    const int64_t first = item / ranks * kRows, last = state_min(rows, first + kRows);
    const int64_t low = item % ranks * kRanks, high = state_min(rank, low + kRanks);
    for (int64_t r = low; r < high; r++)
      for (int64_t row = first; row < last; row++)
        if (known(row))
          inner[row * rank + r] =
              dot<Dtype>(a, (slots[row] * rank + r) * in, (const float *)op.p[1] + row * op.i[4], in);
  }
  worker.reset_work();

  const int64_t parts = (out + kOutputs - 1) / kOutputs;
  for (int64_t item = worker.next_work(); item < blocks * parts; item = worker.next_work()) {
    const int64_t first = item / parts * kRows, last = state_min(rows, first + kRows);
    const int64_t low = item % parts * kOutputs, high = state_min(out, low + kOutputs);
    for (int64_t row = first; row < last; row++) {
      if (!known(row)) continue;
      float *y = (float *)op.p[0] + row * op.i[5];
      for (int64_t n = low; n < high; n++) y[n] += dot<Dtype>(b, (slots[row] * out + n) * rank, inner + row * rank, rank);
    }
  }
}

void lora(const hp_op &op, int64_t rows, const hp_batch *, const Worker &worker) {
  if (op.i[6] == HP_F32) run<HP_F32>(op, rows, worker);
  else if (op.i[6] == HP_F16) run<HP_F16>(op, rows, worker);
  else if (op.i[6] == HP_BF16) run<HP_BF16>(op, rows, worker);
}

}  // namespace

void add_lora(KernelTable &table) { table.run[HP_LORA] = lora; }

HP_END
