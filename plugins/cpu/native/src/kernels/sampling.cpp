// The scan of logits, HP_ARGMAX and HP_SAMPLE's outer part.
//
//  HP_ARGMAX  p0 logits [rows, i0], p1 ids int64[rows], p2 finite uint8[rows] or NULL; i0 vocab, i1 stride.
//             The first of equals; a row with a NaN gives the first NaN.
//  HP_SAMPLE  p0 logits (a mask is written into them), p1 temperature f32[rows], p2 top_k int64, p3 top_p f32, p4 min_p f32
//             (each of the three may be NULL), p5 seeds int64, p6 positions int64, p7 ids int64[rows], p8 finite uint8[rows]
//             or NULL, p9 allowed int32 [rows, i2] or NULL, bit b of word w set where token 32 w + b may be drawn;
//             i0 vocab, i1 stride, i2 words of a row of p9 (0: as many as the vocabulary needs).
//  finite: the largest logit of the row, as it came, is a number: no NaN, no +inf, not all -inf. Single -inf are banned
//  tokens, and fine.
#include "sampling.h"

HP_BEGIN

static inline char *cut(char *&memory, std::size_t bytes) {
  char *start = memory;
  memory += (bytes + 63) & ~std::size_t{63};
  return start;
}

Scan::Scan(int64_t rows, int64_t vocab, const Worker &worker)
    : rows(rows),
      vocab(vocab),
      blocks((vocab + kBlock - 1) / kBlock),
      chunks((vocab + kChunk - 1) / kChunk),
      segments((vocab + kSegment - 1) / kSegment) {
  const std::size_t per_row = 4 * blocks + 2 * 4 * segments + 8 * chunks;
  char *memory = worker.shared_scratch(rows * per_row + 4 * 64);
  block_max = (float *)cut(memory, 4 * rows * blocks);
  segment_max = (float *)cut(memory, 4 * rows * segments);
  raw_max = (float *)cut(memory, 4 * rows * segments);
  sums = (double *)cut(memory, 8 * rows * chunks);
}

// -inf where a token's bit is not set. word: the bits of these W tokens, lowest first.
static inline vf masked(vf x, uint32_t word) {
  vi bits;
  for (int k = 0; k < W; k++) bits[k] = (int32_t)(1u << k);
  return select((splat_int((int32_t)word) & bits) != 0, x, splat(-INFINITY));
}

// One whole block: its maxima and whether it has a NaN; masked in place.
static inline vf scan_block(float *x, const uint32_t *words, vf &raw, vi &nan) {
  vf top = splat(-INFINITY);
  if (!words) {
    for (int k = 0; k < kBlock; k += W) {
      const vf v = load(x + k);
      nan |= v != v;
      top = vmax(v, top);
    }
    raw = vmax(top, raw);
    return top;
  }
  for (int k = 0; k < kBlock; k += W) {
    const vf v = load(x + k);
    nan |= v != v;
    raw = vmax(v, raw);
    const vf kept = masked(v, words[k / 32] >> (k % 32));
    store(x + k, kept);
    top = vmax(kept, top);
  }
  return top;
}

void Scan::segment(float *x, const uint32_t *allowed, int64_t row, int64_t index) const {
  const int64_t first = index * (kSegment / kBlock), last = lesser(blocks, first + kSegment / kBlock);
  vf raw = splat(-INFINITY);
  vi nan = {};
  float top = -INFINITY;
  for (int64_t b = first; b < last; b++) {
    const int64_t start = b * kBlock, count = lesser(kBlock, vocab - start);
    float *block = x + start, tail[kBlock];
    uint32_t bits[2] = {0, 0};
    const uint32_t *words = allowed ? allowed + start / 32 : nullptr;
    if (count < kBlock) {  // the row's end, filled up
      for (int k = 0; k < kBlock; k++) tail[k] = k < count ? x[start + k] : -INFINITY;
      block = tail;
      for (int64_t k = 0; allowed && k * 32 < count; k++) bits[k] = words[k];
      if (allowed) words = bits;
    }
    const float here = max_lane(scan_block(block, words, raw, nan));
    if (block == tail && allowed) std::memcpy(x + start, tail, count * sizeof(float));
    block_max[row * blocks + b] = here;
    top = here > top ? here : top;
  }
  segment_max[row * segments + index] = top;
  raw_max[row * segments + index] = any(nan) ? NAN : max_lane(raw);
}

float Scan::max(int64_t row) const {
  float top = -INFINITY;
  for (int64_t s = 0; s < segments; s++) {
    const float here = segment_max[row * segments + s];
    top = here > top ? here : top;
  }
  return top;
}

float Scan::raw(int64_t row) const {
  float top = -INFINITY;
  for (int64_t s = 0; s < segments; s++) {
    const float here = raw_max[row * segments + s];
    if (here != here) return here;
    top = here > top ? here : top;
  }
  return top;
}

int64_t Scan::best(const float *x, int64_t row) const {
  const float *of = maxima(row), top = max(row), raw_top = raw(row);
  if (raw_top != raw_top)
    for (int64_t i = 0; i < vocab; i++)
      if (x[i] != x[i]) return i;
  for (int64_t b = 0; b < blocks; b++) {
    if (of[b] != top) continue;
    for (int64_t i = b * kBlock; i < vocab; i++)
      if (x[i] == top) return i;
  }
  return 0;
}

float Scan::reached_by(int64_t row, int64_t m, Candidate *room) const {
  const float *of = maxima(row);
  const int64_t each = 4 * m <= chunks ? kChunk / kBlock : 1;  // maxima of chunks do where they are many, and are fewer
  if (2 * m > blocks) return -INFINITY;
  int64_t count = 0;
  for (int64_t b = 0; b < blocks; b += each) {
    float top = of[b];
    for (int64_t k = b + 1; k < lesser(blocks, b + each); k++) top = of[k] > top ? of[k] : top;
    room[count++] = Candidate{top, 0};
  }
  std::nth_element(room, room + (m - 1), room + count, Before());
  return room[m - 1].x;
}

int64_t Scan::gather(const float *x, int64_t row, float low, Candidate *out) const {
  const float *of = maxima(row);
  int64_t n = 0;
  for (int64_t b = 0; b < blocks; b++) {
    if (!(of[b] >= low)) continue;
    const int64_t end = lesser(vocab, (b + 1) * kBlock);
    for (int64_t i = b * kBlock; i < end; i++) {
      out[n] = Candidate{x[i], (int32_t)i};
      n += x[i] >= low;
    }
  }
  return n;
}

void run_scan(const hp_op &op, const Scan &scan, const uint32_t *allowed, int64_t words, const Worker &worker) {
  float *logits = (float *)op.p[0];
  const int64_t pieces = scan.rows * scan.segments;
  for (int64_t piece = worker.next_work(); piece < pieces; piece = worker.next_work()) {
    const int64_t row = piece / scan.segments;
    scan.segment(logits + row * op.i[1], allowed ? allowed + row * words : nullptr, row, piece % scan.segments);
  }
  worker.reset_work();
}

static void argmax(const hp_op &op, int64_t rows, const hp_batch *, const Worker &worker) {
  const Scan scan(rows, op.i[0], worker);
  run_scan(op, scan, nullptr, 0, worker);
  const float *logits = (const float *)op.p[0];
  uint8_t *finite = (uint8_t *)op.p[2];
  for (int64_t row = worker.next_work(); row < rows; row = worker.next_work()) {
    ((int64_t *)op.p[1])[row] = scan.best(logits + row * op.i[1], row);
    if (finite) finite[row] = is_finite(scan.raw(row));
  }
}

static void sample(const hp_op &op, int64_t rows, const hp_batch *, const Worker &worker) {
  const Scan scan(rows, op.i[0], worker);
  run_scan(op, scan, (const uint32_t *)op.p[9], op.i[2] ? op.i[2] : (op.i[0] + 31) / 32, worker);
  sample_rows(op, scan, worker);
}

void add_sampling(KernelTable &table) {
  table.run[HP_ARGMAX] = argmax;
  table.run[HP_SAMPLE] = sample;
  add_logit_rules(table);
  add_logprobs(table);
  add_route(table);
}

HP_END
