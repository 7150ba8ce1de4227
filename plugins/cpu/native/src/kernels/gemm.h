// What the parts of the GEMM share: rows of activations in, rows of results out.
//
// Integer weights meet activations as int8, quantized once per call with one scale per 16 columns (with one per 32, as the
// codes of Q8_0 have, the divergence from float32 is half as large again: docs/experiments.md). Rows are packed in tiles of
// kTile (the last one narrower): codes [tile][block][row of tile][32]; scales [tile][block][which][row of tile], where
// `which` is the scales of both halves, then scale * sum of codes (of the block; of each half where the weight has `halves`),
// then, for weights stored less a base, the int32 that the integer sums of each half start from.
// Float weights meet the rows as they are.
//
// A row's result does not depend on its tile: integer sums are exact, and floats add block by block in order.
#pragma once

#include "gemm_dot.h"

HP_BEGIN

// A group of rows; `x` for float weights, the other two for integer ones.
struct Rows {
  int64_t count;
  const float *x;
  int64_t stride;
  const int8_t *codes;
  const float *scales;
};

// Where results go: out[row * stride + n] = sum + bias[n] + residual[row * residual_stride + n].
struct Result {
  float *out;
  int64_t stride;
  const float *bias;      // or NULL
  const float *residual;  // or NULL; may be `out`
  int64_t residual_stride;
};

// Sizes of a packed row.
static inline int64_t row_codes(const hp_weight &w) { return is_float(w.codes) ? 0 : w.units * kBlock; }
constexpr int64_t scales_per_block(bool halves, bool based) { return (halves ? 4 : 3) + (based ? 2 : 0); }
static inline int64_t row_scales(const hp_weight &w) {
  return is_float(w.codes) ? 0 : w.units * scales_per_block(w.halves, is_based(w.codes));
}

// Quantize row `row` of `count` into its place; `factor` multiplies it first.
void quantize_row(const hp_weight &w, const float *x, float factor, int64_t row, int64_t count, int8_t *codes, float *scales);

// Bytes that `multiply` needs of the thread's own memory.
int64_t multiply_bytes(const hp_weight &w);

// Results of the weight's panels [begin, end) for all rows. `following`: the panel that this thread works on afterwards, to be
// fetched ahead, or -1.
void multiply(const hp_weight &w, int64_t begin, int64_t end, int64_t following, const Rows &rows, const Result &result,
              char *scratch);
void multiply_integer(const hp_weight &w, int64_t begin, int64_t end, int64_t following, const Rows &rows,
                      const Result &result, char *scratch);
void multiply_float(const hp_weight &w, int64_t begin, int64_t end, const Rows &rows, const Result &result);

// sums [count][16] of one panel to their places.
static inline void emit(const hp_weight &w, int64_t panel, int64_t first_row, int count, const float *sums, const Result &r) {
  const int64_t n = panel * kRows, width = w.rows - n < kRows ? w.rows - n : kRows;
  for (int c = 0; c < count; c++) {
    const int64_t row = first_row + c;
    float *out = r.out + row * r.stride + n;
    const float *sum = sums + c * kRows, *residual = r.residual ? r.residual + row * r.residual_stride + n : nullptr;
    if (width == kRows) {
      for (int k = 0; k < kRows; k += W) {
        vf v = load(sum + k);
        if (r.bias) v = v + load(r.bias + n + k);
        if (residual) v = v + load(residual + k);
        store(out + k, v);
      }
    } else {
      for (int64_t k = 0; k < width; k++) {
        float v = sum[k];
        if (r.bias) v = v + r.bias[n + k];
        if (residual) v = v + residual[k];
        out[k] = v;
      }
    }
  }
}

hp_weight *weight_new(const Worker *worker, const hp_matrix &matrix, bool exact);
void linear(const hp_op &op, int64_t rows, const hp_batch *batch, const Worker &worker);
void experts(const hp_op &op, int64_t rows, const hp_batch *batch, const Worker &worker);

HP_END
