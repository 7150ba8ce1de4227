// Which tokens top-k and top-p keep where they are too many to sort: a radix search over the logits' bits.
//
// Counts and weights are added up by the upper 13 bits of each logit (as an integer of the same order). Walking the bins from
// the top says in which bin the edge lies; only that bin's tokens are looked at further, by 10 and then 9 bits while they are
// many, sorted once they are few.
#include "sampling_draw.h"

HP_BEGIN

namespace {

constexpr int kFirst = 19, kSecond = 9;  // bits below the first and the second digit

struct Edge {
  int64_t count;  // tokens kept
  double mass;    // their weight
  float x;        // the last one's logit
  bool all;       // every token with weight is kept
};

// The goal: `limit` tokens, or a weight of `target`, whichever comes first.
struct Goal {
  int64_t limit;
  double target;
  bool met(int64_t count, double mass) const { return count >= limit || mass >= target; }
};

inline int64_t bin_of(float x) { return (order_of(x) >> kFirst) + kBins / 2; }

void fill_bins(const Row &row, const Room &room, bool weigh) {
  std::memset(room.count, 0, kBins * sizeof(int32_t));
  std::memset(room.mass, 0, kBins * sizeof(double));
  const float *maxima = row.scan.maxima(row.row);
  const Keep keep = Keep::all(row);
  for (int64_t b = 0; b < row.scan.blocks; b++) {
    if (!(maxima[b] >= row.floor)) continue;
    float tail[kBlock], low;
    double weights[kBlock];
    const float *x = keep.block(row, b, tail, low);
    if (weigh) row.block_weights(x, low, weights);
    for (int64_t k = 0; k < kBlock; k++) {
      if (!(x[k] >= row.floor)) continue;
      const int64_t bin = bin_of(x[k]);
      room.count[bin]++;
      if (weigh) room.mass[bin] += weights[k];
    }
  }
}

// Walk bins from the top until the next one would meet the goal, and return it; -1 if none does.
int64_t walk_bins(const int32_t *count, const double *mass, int64_t bins, const Goal &goal, Edge &edge) {
  for (int64_t bin = bins - 1; bin >= 0; bin--) {
    if (!count[bin]) continue;
    if (goal.met(edge.count + count[bin], edge.mass + mass[bin])) return bin;
    edge.count += count[bin];
    edge.mass += mass[bin];
  }
  return -1;
}

int64_t take_bin(const Row &row, int64_t bin, Candidate *out) {
  const float *maxima = row.scan.maxima(row.row);
  const float low = of_order((int32_t)((bin - kBins / 2) * (1 << kFirst)));
  int64_t n = 0;
  for (int64_t b = 0; b < row.scan.blocks; b++) {
    if (!(maxima[b] >= low) || !(maxima[b] >= row.floor)) continue;
    const int64_t end = lesser(row.scan.vocab, (b + 1) * kBlock);
    for (int64_t i = b * kBlock; i < end; i++) {
      out[n] = Candidate{row.x[i], (int32_t)i};
      n += row.x[i] >= row.floor && bin_of(row.x[i]) == bin;
    }
  }
  return n;
}

// Of the `count` candidates keep those of the bin, by the digit of `bits` bits above `shift`, in which the edge lies.
int64_t narrow(const Row &row, const Room &room, int64_t count, int shift, int bits, const Goal &goal, Edge &edge) {
  Candidate *of = room.candidates;
  double *mass = room.mass + kBins, weights[kBlock];
  int32_t *counts = room.count + kBins, digits = (1 << bits) - 1;
  std::memset(counts, 0, kFine * sizeof(int32_t));
  std::memset(mass, 0, kFine * sizeof(double));
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t here = lesser(kBlock, count - start);
    row.candidate_weights(of + start, here, weights);
    for (int64_t k = 0; k < here; k++) {
      const int32_t digit = (order_of(of[start + k].x) >> shift) & digits;
      counts[digit]++;
      mass[digit] += weights[k];
    }
  }
  int64_t bin = walk_bins(counts, mass, kFine, goal, edge);
  if (bin < 0) {  // sums of another order fell short by a rounding: the edge is in the last bin
    bin = 0;
    while (!counts[bin]) bin++;
    edge.count -= counts[bin];
    edge.mass -= mass[bin];
  }
  int64_t n = 0;
  for (int64_t k = 0; k < count; k++) {
    of[n] = of[k];
    n += ((order_of(of[k].x) >> shift) & digits) == bin;
  }
  return n;
}

Edge find_edge(const Row &row, const Room &room, const Goal &goal) {
  Edge edge{0, 0.0, row.floor, false};
  const int64_t bin = walk_bins(room.count, room.mass, kBins, goal, edge);
  if (bin < 0) {
    edge.all = true;
    return edge;
  }
  Candidate *of = room.candidates;
  int64_t count = take_bin(row, bin, of);
  if (count > kSorted) count = narrow(row, room, count, kSecond, kFirst - kSecond, goal, edge);
  if (count > kSorted) count = narrow(row, room, count, 0, kSecond, goal, edge);
  if (count <= kSorted) std::sort(of, of + count, Before());  // else they are equal
  double weights[kBlock];
  for (int64_t k = 0; k < count; k++) {
    if (k % kBlock == 0) row.candidate_weights(of + k, lesser(kBlock, count - k), weights);
    edge.count++;
    edge.mass += weights[k % kBlock];
    edge.x = of[k].x;
    if (goal.met(edge.count, edge.mass)) break;
  }
  return edge;
}

}  // namespace

Keep equals(const Row &row, float edge) {
  const double weight = row.weight(edge);
  const float top = (float)row.peak;
  Keep keep{edge, edge, row.scan.vocab};
  if (edge > row.floor && row.weight(next_down(edge)) == weight)
    keep.low = least(row.floor, edge, [&](float x) { return row.weight(x) >= weight; });
  if (edge < top && row.weight(next_up(edge)) == weight)
    keep.high = next_down(least(edge, next_up(top), [&](float x) { return x > top || row.weight(x) > weight; }));
  return keep;
}

Keep leading(const Row &row, int64_t count, float edge) {
  Keep keep = equals(row, edge);
  const float *maxima = row.scan.maxima(row.row);
  int64_t left = count;  // of the equals, once the larger ones are taken away
  for (int64_t b = 0; b < row.scan.blocks; b++) {
    if (!(maxima[b] > keep.high)) continue;
    for (int64_t i = b * kBlock; i < lesser(row.scan.vocab, (b + 1) * kBlock); i++) left -= row.x[i] > keep.high;
  }
  for (int64_t b = 0; b < row.scan.blocks; b++) {
    if (!(maxima[b] >= keep.low)) continue;
    for (int64_t i = b * kBlock; i < lesser(row.scan.vocab, (b + 1) * kBlock); i++) {
      if (!(row.x[i] >= keep.low && row.x[i] <= keep.high) || --left > 0) continue;
      keep.last = i;
      return keep;
    }
  }
  return keep;
}

Keep search(const Row &row, const Room &room) {
  const bool by_weight = row.top_p < 1.0;
  fill_bins(row, room, by_weight);
  Goal goal{row.top_k ? row.top_k : INT64_MAX, INFINITY};
  double total = 0;
  if (row.top_k) {
    const Edge edge = find_edge(row, room, goal);
    if (!by_weight) return edge.all ? Keep::all(row) : leading(row, edge.count, edge.x);
    total = edge.mass;
  } else {
    for (int64_t c = 0; c < row.scan.chunks; c++) total += row.scan.sums[row.row * row.scan.chunks + c];
  }
  goal.target = row.top_p * total;
  const Edge edge = find_edge(row, room, goal);
  return edge.all ? Keep::all(row) : leading(row, edge.count, edge.x);
}

HP_END
