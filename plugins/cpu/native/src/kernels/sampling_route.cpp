// HP_ROUTE  p0 logits [rows, i0], p1 bias f32[i0] or NULL, p2 weights f32 [rows, i1], p3 ids int64 [rows, i1];
//           i0 experts, i1 top_k, i2 score (0 softmax, 1 sigmoid, 2 topk_softmax, 3 topk_sigmoid), i3 renormalize, i4 groups,
//           i5 top_groups, i6 group score (0 the best, 1 the sum of the best two), i7 stride of p0 (0: i0); f0 scale.
// The contract is moe_route. The bias steers the choice, not the weights. Of equals the lower id comes first; a NaN counts as
// larger than any number.
#include "sampling.h"

HP_BEGIN

namespace {

enum Score { kSoftmax = 0, kSigmoid = 1, kTopSoftmax = 2, kTopSigmoid = 3 };

inline bool beats(float a, float b) { return a > b || (a != a && b == b); }

// The first `k` of values[count] in descending order.
void first_of(const float *values, int64_t count, int64_t k, int64_t *ids) {
  int64_t held = 0;
  for (int64_t e = 0; e < count; e++) {
    if (held == k && !beats(values[e], values[ids[k - 1]])) continue;
    int64_t at = held < k ? held++ : k - 1;
    for (; at > 0 && beats(values[e], values[ids[at - 1]]); at--) ids[at] = ids[at - 1];
    ids[at] = e;
  }
}

// Softmax or sigmoid in float64, rounded once. In place is fine.
void score_of(const float *x, int64_t count, bool softmax, float *out) {
  double total = 0;
  float peak = x[0];
  for (int64_t k = 1; softmax && k < count; k++) peak = beats(x[k], peak) ? x[k] : peak;
  for (int64_t start = 0; start < count; start += D) {
    const int64_t here = lesser(D, count - start);
    vd v = {};
    for (int64_t k = 0; k < here; k++) v[k] = softmax ? x[start + k] - peak : -(double)x[start + k];
    const vl nan = v != v;
    vd e = select_double(nan, v, exp_double(v));
    if (!softmax) e = splat_double(1.0) / (splat_double(1.0) + e);
    for (int64_t k = 0; k < here; k++) {
      total += e[k];
      out[start + k] = (float)e[k];
    }
  }
  for (int64_t k = 0; softmax && k < count; k++) out[k] = (float)(out[k] / total);
}

// -inf for experts outside the best groups.
void keep_groups(const hp_op &op, float *choice, float *quality, int64_t *ids) {
  const int64_t groups = op.i[4], size = op.i[0] / groups, keep = lesser(op.i[5], groups);
  for (int64_t g = 0; g < groups; g++) {
    const float *of = choice + g * size;
    int64_t best[2] = {0, 0};
    first_of(of, size, size > 1 ? 2 : 1, best);
    quality[g] = op.i[6] ? of[best[0]] + of[best[1]] : of[best[0]];
  }
  first_of(quality, groups, keep, ids);
  for (int64_t g = 0; g < groups; g++) {
    bool kept = false;
    for (int64_t k = 0; k < keep; k++) kept |= ids[k] == g;
    for (int64_t e = g * size; !kept && e < (g + 1) * size; e++) choice[e] = -INFINITY;
  }
}

void route_row(const hp_op &op, const float *logits, float *weights, int64_t *ids, float *scores, int64_t *group_ids) {
  const int64_t experts = op.i[0], top_k = op.i[1];
  const float *bias = (const float *)op.p[1], scale = op.f[0];
  float *choice = scores + experts, *quality = choice + experts;
  const bool late = op.i[2] == kTopSoftmax || op.i[2] == kTopSigmoid;
  if (late) std::memcpy(scores, logits, experts * sizeof(float));
  else score_of(logits, experts, op.i[2] == kSoftmax, scores);
  for (int64_t e = 0; e < experts; e++) choice[e] = bias ? scores[e] + bias[e] : scores[e];
  if (!late && op.i[4] > 1) keep_groups(op, choice, quality, group_ids);
  first_of(choice, experts, top_k, ids);
  for (int64_t k = 0; k < top_k; k++) weights[k] = scores[ids[k]];
  if (late) score_of(weights, top_k, op.i[2] == kTopSoftmax, weights);
  float total = 1.f;
  if (!late && op.i[3]) {
    total = 0.f;
    for (int64_t k = 0; k < top_k; k++) total += weights[k];
    total += 1e-20f;
  }
  for (int64_t k = 0; k < top_k; k++) weights[k] = weights[k] / total * scale;
}

void route(const hp_op &op, int64_t rows, const hp_batch *, const Worker &worker) {
  const int64_t experts = op.i[0], top_k = op.i[1], stride = op.i[7] ? op.i[7] : experts;
  char *memory = worker.scratch(experts * (3 * sizeof(float) + sizeof(int64_t)) + 64);
  int64_t *group_ids = (int64_t *)memory;
  float *scores = (float *)(group_ids + experts);
  int64_t begin, end;
  share(rows, 1, worker, begin, end);
  for (int64_t row = begin; row < end; row++)
    route_row(op, (const float *)op.p[0] + row * stride, (float *)op.p[2] + row * top_k, (int64_t *)op.p[3] + row * top_k,
              scores, group_ids);
}

}  // namespace

void add_route(KernelTable &table) { table.run[HP_ROUTE] = route; }

HP_END
