// One row's draw: weights, which tokens a filter keeps, and the draw among them.
//
// weight(x) = exp((x - peak) / temperature) in float64, as the reference has it. Filters become thresholds on the logits,
// since the weight grows with the logit; where several logits have one weight (huge temperatures, logits near 0) they count
// as equals, and of equals the lower ids stay.
#pragma once

#include "sampling.h"

HP_BEGIN

struct Row {
  const Scan &scan;
  const float *x;
  int64_t row;
  bool draws;          // else the first of the largest
  bool whole;          // needs the sum over the vocabulary
  bool few;            // top_k is small enough to sort
  double temperature;  // > 0 where it draws
  double peak;         // the largest logit
  float floor;         // logits below it have no weight
  int64_t top_k;       // 0 for all
  double top_p;        // >= 1 for all
  double u;            // uniform in [0, 1)

  Row(const hp_op &op, const Scan &scan, int64_t row);

  vd power(vd logits) const {
    const vd z = logits - splat_double(peak);
    return temperature == 1.0 ? z : z / splat_double(temperature);
  }
  vd weight(vd logits) const { return exp_double(power(logits)); }
  double weight(float logit) const { return weight(splat_double(logit))[0]; }
  // weight(logits) where they are >= low, else 0. low >= floor, whose power is at least -54.
  vd weight_from(vd logits, vd low) const { return (vd)((logits >= low) & (vl)exp_within(power(logits))); }
  // out[k] = weight(logits[k]) where logits[k] >= low, else 0. One block.
  void block_weights(const float *logits, float low, double *out) const {
    const vd least = splat_double(low);
    for (int k = 0; k < kBlock; k += D) {
      const vd w = weight_from(widen(logits + k), least);
      std::memcpy(out + k, &w, sizeof w);
    }
  }
  void candidate_weights(const Candidate *of, int64_t count, double *out) const {
    for (int64_t k = 0; k < count; k += D) {
      vd v = splat_double(-INFINITY);
      const int64_t here = lesser(D, count - k);
      for (int64_t j = 0; j < here; j++) v[j] = of[k + j].x;
      v = weight(v);
      for (int64_t j = 0; j < here; j++) out[k + j] = v[j];
    }
  }
};

// Tokens that stay: logits above `high`, and those in [low, high] whose id is at most `last`.
struct Keep {
  float low, high;
  int64_t last;

  static Keep all(const Row &row) { return Keep{row.floor, row.floor, row.scan.vocab}; }
  // Block b, what goes replaced by -inf in `room` if it must be; logits below `least` go, too.
  const float *block(const Row &row, int64_t b, float *room, float &least) const;
};

// Memory of one thread. sorted: how many candidates may be weighed at once.
constexpr int64_t kSorted = 4096, kBins = 8192, kFine = 1024;
struct Room {
  Candidate *candidates;  // [vocabulary + blocks + 1]
  double *weights;        // [most]
  double *mass;           // [kBins], then [kFine]
  int32_t *count;         // likewise
  int64_t most;           // max(kSorted, blocks)
};

// Weights of a chunk's kept tokens, summed.
double chunk_sum(const Row &row, const Keep &keep, int64_t chunk);
// The token at which the running weight passes u of the total, by the chunks' sums in scan.sums.
int64_t pick(const Row &row, const Keep &keep);

// The logits whose weight equals that of `edge`: [low, high]; sampling_search.cpp.
Keep equals(const Row &row, float edge);
// The first `count` of the row's order, the last of which has the logit `edge`.
Keep leading(const Row &row, int64_t count, float edge);
// What top-k and top-p keep, however many that is. sampling_search.cpp
Keep search(const Row &row, const Room &room);

HP_END
