// HP_SAMPLE after the scan: sums over the vocabulary where a row needs them, then each row's filters and draw.
//
// The draw is the reference's: u from the hash of (seed, position), then the first token, in the order of ids, at which the
// running sum of kept weights exceeds u * total. Sums are float64 and run by chunks, so that u * total falls on another
// token than in the reference's running sum about once in 10^9 draws.
#include "sampling_draw.h"

HP_BEGIN

// Finalizer of SplitMix64 (Steele, Lea, Flood 2014).
static inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

static inline double uniform(int64_t seed, int64_t position) {
  const uint64_t step = 0x9E3779B97F4A7C15u;
  const uint64_t key = mix((uint64_t)seed + step);
  const uint64_t bits = mix(key + ((uint64_t)position + 1) * step);
  return (double)(int64_t)(bits >> 16) * 0x1p-48;
}

Row::Row(const hp_op &op, const Scan &scan, int64_t row)
    : scan(scan), x((const float *)op.p[0] + row * op.i[1]), row(row), draws(false), whole(false), few(false) {
  temperature = ((const float *)op.p[1])[row];
  top_k = op.p[2] ? ((const int64_t *)op.p[2])[row] : 0;
  top_p = op.p[3] ? ((const float *)op.p[3])[row] : 1.0;
  const double min_p = op.p[4] ? ((const float *)op.p[4])[row] : 0.0;
  if (top_k < 0 || top_k >= scan.vocab) top_k = 0;
  const float top = scan.max(row);
  peak = top;
  draws = temperature > 0 && is_finite(top) && is_finite(scan.raw(row)) && !(min_p > 1.0);
  if (!draws) return;
  // e^-54 times the largest vocabulary is below half an ulp of the total: those tokens change no sum
  const double lowest = peak - 54.0 * temperature;
  floor = lowest > -FLT_MAX ? (float)lowest : -FLT_MAX;
  if (floor > top) floor = top;
  if (min_p > 0) floor = least(floor, top, [&](float logit) { return weight(logit) >= min_p; });
  whole = top_k == 0;
  few = top_k && (2 * top_k <= scan.blocks || scan.vocab <= kSorted);
  u = uniform(((const int64_t *)op.p[5])[row], ((const int64_t *)op.p[6])[row]);
}

const float *Keep::block(const Row &row, int64_t b, float *room, float &least) const {
  const int64_t start = b * kBlock, count = lesser(kBlock, row.scan.vocab - start);
  least = low;
  if (count == kBlock && start + kBlock - 1 <= last) return row.x + start;
  if (count == kBlock && start > last) {
    least = next_up(high);
    return row.x + start;
  }
  for (int64_t k = 0; k < kBlock; k++) {
    const bool stays = k < count && (start + k <= last || row.x[start + k] > high);
    room[k] = stays ? row.x[start + k] : -INFINITY;
  }
  return room;
}

double chunk_sum(const Row &row, const Keep &keep, int64_t chunk) {
  const float *maxima = row.scan.maxima(row.row);
  const int64_t first = chunk * (kChunk / kBlock), last = lesser(row.scan.blocks, first + kChunk / kBlock);
  vd sum[4] = {};
  for (int64_t b = first; b < last; b++) {
    if (!(maxima[b] >= keep.low)) continue;
    float room[kBlock], low;
    const float *x = keep.block(row, b, room, low);
    const vd least = splat_double(low);
    for (int k = 0; k < kBlock; k += 4 * D)
      for (int j = 0; j < 4; j++) sum[j] += row.weight_from(widen(x + k + j * D), least);
  }
  return sum_double((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

int64_t pick(const Row &row, const Keep &keep) {
  const float *maxima = row.scan.maxima(row.row);
  const double *sums = row.scan.sums + row.row * row.scan.chunks;
  double total = 0, running = 0;
  int64_t end = 0;  // behind the last chunk with weight
  for (int64_t c = 0; c < row.scan.chunks; c++) {
    total += sums[c];
    if (sums[c] > 0) end = c + 1;
  }
  const double target = row.u * total;
  int64_t chunk = 0;
  while (chunk + 1 < end && !(running + sums[chunk] > target)) running += sums[chunk++];
  int64_t found = 0;
  const int64_t first = chunk * (kChunk / kBlock), last = lesser(row.scan.blocks, first + kChunk / kBlock);
  for (int64_t b = first; b < last; b++) {
    if (!(maxima[b] >= keep.low)) continue;
    float room[kBlock], low;
    double weights[kBlock];
    const float *x = keep.block(row, b, room, low);
    row.block_weights(x, low, weights);
    for (int64_t k = 0; k < kBlock; k++) {
      if (!(weights[k] > 0)) continue;
      running += weights[k];
      found = b * kBlock + k;
      if (running > target) return found;
    }
  }
  return found;  // rounding: the chunk's last
}

static int64_t draw_kept(const Row &row, const Keep &keep) {
  for (int64_t c = 0; c < row.scan.chunks; c++) row.scan.sums[row.row * row.scan.chunks + c] = chunk_sum(row, keep, c);
  return pick(row, keep);
}

// The `most` largest logits with weight, sorted; returns how many there are. all: whether that is every one with weight.
static int64_t take_leading(const Row &row, int64_t most, Candidate *out, bool &all) {
  float low = row.scan.reached_by(row.row, most, out);
  if (!(low > row.floor)) low = row.floor;
  int64_t count = row.scan.gather(row.x, row.row, low, out);
  all = low == row.floor && count <= most;
  if (count > most) {
    std::nth_element(out, out + most, out + count, Before());
    count = most;
  }
  std::sort(out, out + count, Before());
  return count;
}

// How many of `count` sorted weights it takes to reach the target; count + 1 if they do not.
static int64_t reaches(const double *weights, int64_t count, double target) {
  double running = 0;
  for (int64_t k = 0; k < count; k++) {
    running += weights[k];
    if (running >= target) return k + 1;
  }
  return count + 1;
}

// Draw among the first `count` sorted candidates.
static int64_t draw_leading(const Row &row, const Room &room, int64_t count) {
  Candidate *of = room.candidates;
  const float edge = of[count - 1].x;
  const Keep keep = equals(row, edge);
  if (keep.low != edge || keep.high != edge) return draw_kept(row, leading(row, count, edge));
  std::sort(of, of + count, ById());
  row.candidate_weights(of, count, room.weights);
  double total = 0, running = 0;
  for (int64_t k = 0; k < count; k++) total += room.weights[k];
  const double target = row.u * total;
  for (int64_t k = 0; k < count; k++) {
    running += room.weights[k];
    if (running > target) return of[k].id;
  }
  return of[count - 1].id;
}

// top-k small enough to sort, and top-p among these.
static int64_t draw_top_k(const Row &row, const Room &room) {
  bool all;
  int64_t count = take_leading(row, row.top_k, room.candidates, all);
  if (row.top_p < 1.0) {
    row.candidate_weights(room.candidates, count, room.weights);
    double total = 0;
    for (int64_t k = 0; k < count; k++) total += room.weights[k];
    count = lesser(count, reaches(room.weights, count, row.top_p * total));
  }
  return draw_leading(row, room, count);
}

// top-p alone. Mostly a few dozen tokens hold it; else some hundreds; else the search over the vocabulary.
static int64_t draw_top_p(const Row &row, const Room &room) {
  const double *sums = row.scan.sums + row.row * row.scan.chunks;
  double total = 0;
  for (int64_t c = 0; c < row.scan.chunks; c++) total += sums[c];
  for (int64_t most : {(int64_t)64, (int64_t)1024}) {
    if (row.scan.vocab <= kSorted) most = row.scan.vocab;
    else if (2 * most > row.scan.blocks) break;
    bool all;
    const int64_t count = take_leading(row, most, room.candidates, all);
    row.candidate_weights(room.candidates, count, room.weights);
    const int64_t needed = reaches(room.weights, count, row.top_p * total);
    if (needed <= count || all) return draw_leading(row, room, lesser(needed, count));
  }
  return draw_kept(row, search(row, room));
}

static int64_t draw(const Row &row, const Room &room) {
  if (!row.draws) return row.scan.best(row.x, row.row);
  if (row.few) return draw_top_k(row, room);
  if (row.top_k) return draw_kept(row, search(row, room));
  return row.top_p < 1.0 ? draw_top_p(row, room) : pick(row, Keep::all(row));
}

static Room room_of(const Scan &scan, const Worker &worker) {
  Room room;
  room.most = scan.blocks > kSorted ? scan.blocks : kSorted;
  const int64_t candidates = scan.vocab + scan.blocks + 1, bins = kBins + kFine;
  char *memory = worker.scratch(8 * candidates + 8 * room.most + 12 * bins);
  room.candidates = (Candidate *)memory;
  room.weights = (double *)(memory + 8 * candidates);
  room.mass = room.weights + room.most;
  room.count = (int32_t *)(room.mass + bins);
  return room;
}

static void sum_rows(const hp_op &op, const Scan &scan, const Worker &worker) {
  const int64_t pieces = scan.rows * scan.segments;
  for (int64_t piece = worker.next_work(); piece < pieces; piece = worker.next_work()) {
    const Row row(op, scan, piece / scan.segments);
    if (!row.whole) continue;
    const int64_t first = piece % scan.segments * (kSegment / kChunk);
    const int64_t last = lesser(scan.chunks, first + kSegment / kChunk);
    for (int64_t c = first; c < last; c++) scan.sums[row.row * scan.chunks + c] = chunk_sum(row, Keep::all(row), c);
  }
  worker.reset_work();
}

void sample_rows(const hp_op &op, const Scan &scan, const Worker &worker) {
  bool sums = false;
  for (int64_t row = 0; row < scan.rows && !sums; row++) sums = Row(op, scan, row).whole;
  if (sums) sum_rows(op, scan, worker);
  const Room room = room_of(scan, worker);
  uint8_t *finite = (uint8_t *)op.p[8];
  for (int64_t row = worker.next_work(); row < scan.rows; row = worker.next_work()) {
    ((int64_t *)op.p[7])[row] = draw(Row(op, scan, row), room);
    if (finite) finite[row] = is_finite(scan.raw(row));
  }
}

HP_END
