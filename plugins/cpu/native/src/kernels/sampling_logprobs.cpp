// HP_LOGPROBS  p0 logits [rows, i0], p1 token ids int64[rows], p2 chosen f32[rows], p3 rank int64[rows] from 1,
//              p4 top ids int64 [rows, i2], p5 top f32 [rows, i2], descending; i0 vocab, i1 stride, i2 k (p4 and p5 may be
//              NULL where it is 0; places beyond the vocabulary get id -1 and -inf).
// Log-softmax as the reference takes it, lp(x) = (x - max) - log(sum), in float32: logits that round to one lp are equals, and
// of equals the lower id comes first. A row with NaN or +inf, or of -inf alone, gives NaN.
#include "sampling.h"

HP_BEGIN

namespace {

// Sum of e^(x - peak) over one chunk. Blocks that lie 40 below the peak are too small to change it.
double exp_sum(const Scan &scan, const float *x, int64_t row, int64_t chunk, float peak) {
  const float *maxima = scan.maxima(row);
  const int64_t first = chunk * (kChunk / kBlock), last = lesser(scan.blocks, first + kChunk / kBlock);
  double total = 0;
  for (int64_t b = first; b < last; b++) {
    if (!(maxima[b] - peak > -40.f)) continue;
    const int64_t start = b * kBlock, count = lesser(kBlock, scan.vocab - start);
    float tail[kBlock];
    const float *of = x + start;
    if (count < kBlock) {
      for (int64_t k = 0; k < kBlock; k++) tail[k] = k < count ? of[k] : -INFINITY;
      of = tail;
    }
    vf sums = {};
    for (int64_t k = 0; k < kBlock; k += W) sums += vexp(load(of + k) - splat(peak));
    total += sum(sums);
  }
  return total;
}

struct LogSoftmax {
  float peak, log_sum;
  float operator()(float x) const { return (x - peak) - log_sum; }
};

// Logits of the row that are >= low.
int64_t count_from(const Scan &scan, const float *x, int64_t row, float low) {
  const float *maxima = scan.maxima(row);
  int64_t n = 0;
  for (int64_t b = 0; b < scan.blocks; b++) {
    if (!(maxima[b] >= low)) continue;
    int32_t here = 0;
    for (int64_t i = b * kBlock; i < lesser(scan.vocab, (b + 1) * kBlock); i++) here += x[i] >= low;
    n += here;
  }
  return n;
}

int64_t rank_of(const Scan &scan, const float *x, int64_t row, const LogSoftmax &lp, float chosen) {
  if (!(lp(lp.peak) > chosen)) return 1;
  return 1 + count_from(scan, x, row, least(-INFINITY, lp.peak, [&](float v) { return lp(v) > chosen; }));
}

// The k likeliest; `room` holds vocab + blocks + 1.
void top_of(const Scan &scan, const float *x, int64_t row, const LogSoftmax &lp, int64_t k, Candidate *room, int64_t *ids,
            float *top) {
  float low = scan.reached_by(row, k, room);
  int64_t n = scan.gather(x, row, low, room);
  std::nth_element(room, room + (k - 1), room + n, Before());
  const float edge = lp(room[k - 1].x);
  const float equal = least(-INFINITY, room[k - 1].x, [&](float v) { return lp(v) >= edge; });
  n = scan.gather(x, row, equal, room);  // with those that only rounding makes equal to the last
  for (int64_t i = 0; i < n; i++) room[i].x = lp(room[i].x);
  std::partial_sort(room, room + k, room + n, Before());
  for (int64_t i = 0; i < k; i++) {
    ids[i] = room[i].id;
    top[i] = room[i].x;
  }
}

void score(const hp_op &op, const Scan &scan, int64_t row, Candidate *room) {
  const float *x = (const float *)op.p[0] + row * op.i[1];
  const int64_t token = ((const int64_t *)op.p[1])[row], k = lesser(op.i[2], scan.vocab);
  float &chosen = ((float *)op.p[2])[row];
  int64_t &rank = ((int64_t *)op.p[3])[row];
  int64_t *ids = (int64_t *)op.p[4] + row * op.i[2];
  float *top = (float *)op.p[5] + row * op.i[2];
  for (int64_t i = k; i < op.i[2]; i++) {
    ids[i] = -1;
    top[i] = -INFINITY;
  }
  const bool known = token >= 0 && token < scan.vocab;
  if (!is_finite(scan.raw(row))) {
    chosen = NAN;
    rank = known;
    for (int64_t i = 0; i < k; i++) {
      ids[i] = i;
      top[i] = NAN;
    }
    return;
  }
  double total = 0;
  for (int64_t c = 0; c < scan.chunks; c++) total += scan.sums[row * scan.chunks + c];
  const LogSoftmax lp{scan.max(row), (float)std::log(total)};
  chosen = known ? lp(x[token]) : -INFINITY;
  rank = known ? rank_of(scan, x, row, lp, chosen) : 0;
  if (k > 0) top_of(scan, x, row, lp, k, room, ids, top);
}

void logprobs(const hp_op &op, int64_t rows, const hp_batch *, const Worker &worker) {
  const Scan scan(rows, op.i[0], worker);
  run_scan(op, scan, nullptr, 0, worker);
  const int64_t pieces = rows * scan.segments;
  for (int64_t piece = worker.next_work(); piece < pieces; piece = worker.next_work()) {
    const int64_t row = piece / scan.segments, first = piece % scan.segments * (kSegment / kChunk);
    const int64_t last = lesser(scan.chunks, first + kSegment / kChunk);
    if (!is_finite(scan.raw(row))) continue;
    const float *x = (const float *)op.p[0] + row * op.i[1], peak = scan.max(row);
    for (int64_t c = first; c < last; c++) scan.sums[row * scan.chunks + c] = exp_sum(scan, x, row, c, peak);
  }
  worker.reset_work();
  Candidate *room = (Candidate *)worker.scratch(sizeof(Candidate) * (scan.vocab + scan.blocks + 1));
  for (int64_t row = worker.next_work(); row < rows; row = worker.next_work()) score(op, scan, row, room);
}

}  // namespace

void add_logprobs(KernelTable &table) { table.run[HP_LOGPROBS] = logprobs; }

HP_END
