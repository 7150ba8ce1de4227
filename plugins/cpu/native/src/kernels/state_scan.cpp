// HP_SSM_SCAN     p0 x [tokens, i0 i1], p1 dt [tokens, i0], p2 b [tokens, i2 i3], p3 c [tokens, i2 i3], p4 pool, p5 a f32[i0],
//                 p6 d f32[i0] or NULL, p7 dt_bias f32[i0] or NULL, p8 y [tokens, i0 i1];
//                 i0 heads, i1 head_dim, i2 groups, i3 state_dim, i4 cache group, i5 dtype of the pool, i6 elements between
//                 pages (0: page_tokens * i0 * i1 * i3), i7 .. i11 strides of x, dt, b, c, y (0: no gaps), i12 softplus on dt;
//                 f0 least dt, f1 largest dt.
// The contract is ssm_scan: S = exp(dt a) S + dt x b^T, y = S c + d x, state [heads, head_dim, state_dim]. A piece of work is
// 16 rows of one head's S for all tokens of a request: they stay in the first cache, and rows of S do not meet.
#include "state.h"

HP_BEGIN

namespace {

constexpr int64_t kRows = 16;

inline int64_t or_else(int64_t stride, int64_t width) { return stride ? stride : width; }

struct Piece {
  const hp_op &op;
  int64_t head, first, count;  // rows [first, first + count) of the head
  int64_t padded;              // state_dim, filled up with zeros
  float *state, *b, *c;        // [kRows, padded], [padded], [padded]

  float step_of(int64_t token) const {
    const float *bias = (const float *)op.p[7];
    float dt = ((const float *)op.p[1])[token * or_else(op.i[8], op.i[0]) + head];
    if (bias) dt += bias[head];
    if (op.i[12] && !(dt > 20.f)) dt = log1pf(expf(dt));
    if (dt < op.f[0]) dt = op.f[0];
    return dt > op.f[1] ? op.f[1] : dt;
  }

  void token(int64_t t) const {
    const int64_t width = op.i[0] * op.i[1], shared = op.i[2] * op.i[3];
    const int64_t own = head / (op.i[0] / op.i[2]) * op.i[3];  // the head's group in b and c
    std::memcpy(b, (const float *)op.p[2] + t * or_else(op.i[9], shared) + own, op.i[3] * sizeof(float));
    std::memcpy(c, (const float *)op.p[3] + t * or_else(op.i[10], shared) + own, op.i[3] * sizeof(float));
    const float dt = step_of(t), decay = expf(dt * ((const float *)op.p[5])[head]);
    const float skip = op.p[6] ? ((const float *)op.p[6])[head] : 0.f;
    const float *x = (const float *)op.p[0] + t * or_else(op.i[7], width) + head * op.i[1] + first;
    float *y = (float *)op.p[8] + t * or_else(op.i[11], width) + head * op.i[1] + first;
    const vf keep = splat(decay);
    for (int64_t r = 0; r < count; r++) {
      float *row = state + r * padded;
      const vf in = splat(dt * x[r]);
      vf sums[2] = {};
      for (int64_t n = 0; n < padded; n += W) {
        const vf s = fma(in, load(b + n), keep * load(row + n));
        store(row + n, s);
        sums[n / W & 1] = fma(s, load(c + n), sums[n / W & 1]);
      }
      y[r] = sum(sums[0] + sums[1]) + skip * x[r];
    }
  }

  void run(const Request &request, const Pool &pool) const {
    const int64_t dim = op.i[1], size = op.i[3];
    std::memset(state, 0, (kRows + 2) * padded * sizeof(float));
    char *home = pool.at(request.page, (head * dim + first) * size);
    for (int64_t r = 0; r < count && !request.starts; r++)
      pool.read(home + r * size * pool.size(), size, state + r * padded);
    for (int64_t t = request.begin; t < request.end; t++) {
      token(t);
      pool.round(state, count * padded);
    }
    for (int64_t r = 0; r < count; r++) pool.write(state + r * padded, size, home + r * size * pool.size());
  }
};

void ssm_scan(const hp_op &op, int64_t rows, const hp_batch *batch, const Worker &worker) {
  const int64_t heads = op.i[0], dim = op.i[1], size = op.i[3], parts = (dim + kRows - 1) / kRows;
  const Pool pool{(char *)op.p[4], op.i[5], or_else(op.i[6], batch->page_tokens * heads * dim * size)};
  const int64_t padded = up_to_w(size), each = heads * parts;
  float *memory = (float *)worker.scratch((kRows + 2) * padded * sizeof(float));
  for (int64_t item = worker.next_work(); item < batch->num_requests * each; item = worker.next_work()) {
    const Request request(*batch, item / each, op.i[4]);
    if (request.begin == request.end) continue;
    const int64_t first = item % parts * kRows;
    const Piece piece{op,     item % each / parts, first, state_min(kRows, dim - first), padded, memory, memory + kRows * padded,
                      memory + (kRows + 1) * padded};
    piece.run(request, pool);
  }
  clear_padding((float *)op.p[8], rows, or_else(op.i[11], heads * dim), heads * dim, *batch, worker);
}

}  // namespace

void add_ssm_scan(KernelTable &table) { table.run[HP_SSM_SCAN] = ssm_scan; }

HP_END
