// HP_GATED_DELTA  p0 q [tokens, i1 i2], p1 k [tokens, i1 i2], p2 v [tokens, i0 i3], p3 decay [tokens, i0], p4 beta [tokens, i0],
//                 p5 pool, p6 out [tokens, i0 i3]; i0 heads, i1 k_heads, i2 k_dim, i3 v_dim, i4 cache group, i5 dtype of the
//                 pool, i6 elements between pages (0: page_tokens * i0 * i2 * i3), i7 .. i12 strides of q, k, v, decay, beta,
//                 out (0: no gaps), i13 l2norm; f0 scale.
// The contract is gated_delta: S = exp(decay) S, u = beta (v - S^T k), S = S + k u^T, out = S^T q scale, state
// [heads, k_dim, v_dim]. Columns of S do not meet: a piece of work is 32 columns of one head for all tokens of a request.
#include "state.h"

HP_BEGIN

namespace {

constexpr int64_t kColumns = 32, kVectors = kColumns / W;

inline int64_t or_else(int64_t stride, int64_t width) { return stride ? stride : width; }

struct Piece {
  const hp_op &op;
  int64_t head, first, count;  // columns [first, first + count) of the head
  float *state;                // [k_dim, kColumns]
  float *q, *k;                // [k_dim filled up with zeros]

  // One token's q or k of this head: divided by its length where asked, times `scale`.
  void vector(const float *from, int64_t stride, int64_t t, float scale, float *to) const {
    const int64_t dim = op.i[2], own = head / (op.i[0] / op.i[1]) * dim;
    std::memcpy(to, from + t * or_else(stride, op.i[1] * dim) + own, dim * sizeof(float));
    if (op.i[13]) {
      vf squares = {};
      for (int64_t i = 0; i < dim; i += W) squares = fma(load(to + i), load(to + i), squares);
      scale *= 1.f / sqrtf(sum(squares) + 1e-6f);
    }
    for (int64_t i = 0; i < dim; i += W) store(to + i, load(to + i) * splat(scale));
  }

  void token(int64_t t) const {
    const int64_t heads = op.i[0], dim = op.i[2], width = heads * op.i[3];
    vector((const float *)op.p[0], op.i[7], t, op.f[0], q);
    vector((const float *)op.p[1], op.i[8], t, 1.f, k);
    const vf keep = splat(expf(((const float *)op.p[3])[t * or_else(op.i[10], heads) + head]));
    const vf beta = splat(((const float *)op.p[4])[t * or_else(op.i[11], heads) + head]);
    float value[kColumns] = {};
    std::memcpy(value, (const float *)op.p[2] + t * or_else(op.i[9], width) + head * op.i[3] + first, count * sizeof(float));
    vf u[kVectors] = {}, out[kVectors] = {};
    for (int64_t i = 0; i < dim; i++)
      for (int64_t j = 0; j < kVectors; j++) u[j] = fma(splat(k[i]), load(state + i * kColumns + j * W), u[j]);
    for (int64_t j = 0; j < kVectors; j++) u[j] = beta * (load(value + j * W) - keep * u[j]);
    for (int64_t i = 0; i < dim; i++)
      for (int64_t j = 0; j < kVectors; j++) {
        float *at = state + i * kColumns + j * W;
        const vf s = fma(splat(k[i]), u[j], keep * load(at));
        store(at, s);
        out[j] = fma(splat(q[i]), s, out[j]);
      }
    float sums[kColumns];
    for (int64_t j = 0; j < kVectors; j++) store(sums + j * W, out[j]);
    std::memcpy((float *)op.p[6] + t * or_else(op.i[12], width) + head * op.i[3] + first, sums, count * sizeof(float));
  }

  void run(const Request &request, const Pool &pool) const {
    const int64_t dim = op.i[2], columns = op.i[3];
    std::memset(state, 0, (dim * kColumns + 2 * up_to_w(dim)) * sizeof(float));
    char *home = pool.at(request.page, head * dim * columns + first);
    for (int64_t i = 0; i < dim && !request.starts; i++)
      pool.read(home + i * columns * pool.size(), count, state + i * kColumns);
    for (int64_t t = request.begin; t < request.end; t++) {
      token(t);
      pool.round(state, dim * kColumns);
    }
    for (int64_t i = 0; i < dim; i++) pool.write(state + i * kColumns, count, home + i * columns * pool.size());
  }
};

void gated_delta(const hp_op &op, int64_t rows, const hp_batch *batch, const Worker &worker) {
  const int64_t heads = op.i[0], dim = op.i[2], columns = op.i[3], parts = (columns + kColumns - 1) / kColumns;
  const Pool pool{(char *)op.p[5], op.i[5], or_else(op.i[6], batch->page_tokens * heads * dim * columns)};
  const int64_t each = heads * parts, padded = up_to_w(dim);
  float *memory = (float *)worker.scratch((dim * kColumns + 2 * padded) * sizeof(float));
  for (int64_t item = worker.next_work(); item < batch->num_requests * each; item = worker.next_work()) {
    const Request request(*batch, item / each, op.i[4]);
    if (request.begin == request.end) continue;
    const int64_t first = item % parts * kColumns;
    const Piece piece{op,     item % each / parts,      first, state_min(kColumns, columns - first), memory,
                      memory + dim * kColumns, memory + dim * kColumns + padded};
    piece.run(request, pool);
  }
  clear_padding((float *)op.p[6], rows, or_else(op.i[12], heads * columns), heads * columns, *batch, worker);
}

}  // namespace

void add_gated_delta(KernelTable &table) { table.run[HP_GATED_DELTA] = gated_delta; }

HP_END
