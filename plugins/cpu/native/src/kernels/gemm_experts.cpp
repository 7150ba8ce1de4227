// HP_EXPERTS: rows are sorted by expert, so that each expert's weights meet all its rows in one pass.
//
// An assignment is a (token, slot) pair; `position` is its place in the order by expert (and then by token and slot). A
// token's results are added up slot by slot, whatever else is in the batch.
#include <initializer_list>
#include <type_traits>

#include "../activation.h"
#include "gemm.h"

HP_BEGIN

namespace {

constexpr int64_t kAssignments = 4096;  // at most in flight; more tokens go in rounds

struct Experts {
  const float *x, *weights;
  const int64_t *ids;
  const hp_weight *const *gate_up, *const *down;
  float *out;
  const float *gate_up_bias, *down_bias;
  int64_t hidden, inner, count, top_k, kind;
  bool gated, weight_on_input;
  float limit, up_offset;

  explicit Experts(const hp_op &op)
      : x((const float *)op.p[0]), weights((const float *)op.p[1]), ids((const int64_t *)op.p[2]),
        gate_up((const hp_weight *const *)op.p[3]), down((const hp_weight *const *)op.p[4]), out((float *)op.p[5]),
        gate_up_bias((const float *)op.p[6]), down_bias((const float *)op.p[7]), hidden(op.i[0]), inner(op.i[1]),
        count(op.i[2]), top_k(op.i[3]), kind(op.i[4]), gated(op.i[5]), weight_on_input(op.i[6]), limit(op.f[0]),
        up_offset(op.f[1]) {}
  int64_t up_rows() const { return gated ? 2 * inner : inner; }
};

// Memory of one round, shared by all threads.
struct Round {
  int64_t *start;     // [experts + 1] first position of each expert
  int64_t *active;    // [experts] those with rows
  int64_t *actives;   // [1] how many
  int64_t *order;     // [assignments] assignment at each position
  int64_t *position;  // [assignments] of each assignment, -1 for an expert that is not here
  int8_t *codes;      // quantized rows, of the input and then of the inner layer
  float *scales;
  float *rows;    // [assignments, hidden or inner] as floats, for float weights
  float *up;      // [assignments, up_rows]
  float *result;  // [assignments, hidden]
};

struct Sizes {
  int64_t codes = 0, scales = 0, own = 0;
};

Sizes sizes_of(const Experts &e) {
  Sizes most;
  const auto raise = [](int64_t &a, int64_t b) { a = a < b ? b : a; };
  for (int64_t k = 0; k < e.count; k++)
    for (const hp_weight *w : {e.gate_up[k], e.down[k]}) {
      raise(most.codes, row_codes(*w));
      raise(most.scales, row_scales(*w));
      raise(most.own, multiply_bytes(*w));
    }
  return most;
}

// Lay the round out in `memory`, or (NULL) only count its bytes.
int64_t lay_out(const Experts &e, const Sizes &sizes, int64_t assignments, char *memory, Round &round) {
  int64_t bytes = 0;
  const auto take = [&](auto &pointer, int64_t count) {
    using Number = std::remove_pointer_t<std::remove_reference_t<decltype(pointer)>>;
    pointer = (Number *)(memory + bytes);
    bytes += (count * (int64_t)sizeof(Number) + 63) / 64 * 64;
  };
  const int64_t widest = e.hidden > e.inner ? e.hidden : e.inner;
  take(round.start, e.count + 1);
  take(round.active, e.count);
  take(round.actives, 1);
  take(round.order, assignments);
  take(round.position, assignments);
  take(round.codes, assignments * sizes.codes);
  take(round.scales, assignments * sizes.scales);
  take(round.rows, assignments * widest);
  take(round.up, assignments * e.up_rows());
  take(round.result, assignments * e.hidden);
  return bytes;
}

// Counting sort of the assignments by expert.
void sort(const Experts &e, const int64_t *ids, int64_t assignments, Round &r) {
  for (int64_t k = 0; k <= e.count; k++) r.start[k] = 0;
  for (int64_t a = 0; a < assignments; a++)
    if (ids[a] >= 0 && ids[a] < e.count) r.start[ids[a] + 1]++;
  *r.actives = 0;
  for (int64_t k = 0; k < e.count; k++) {
    if (r.start[k + 1]) r.active[(*r.actives)++] = k;
    r.start[k + 1] += r.start[k];
  }
  for (int64_t a = 0; a < assignments; a++) {
    const bool here = ids[a] >= 0 && ids[a] < e.count;
    r.position[a] = here ? r.start[ids[a]]++ : -1;
    if (here) r.order[r.position[a]] = a;
  }
  for (int64_t k = e.count; k > 0; k--) r.start[k] = r.start[k - 1];
  r.start[0] = 0;
}

// Row `position` of expert `expert`, in the form that its weight `w` meets.
void put_row(const hp_weight &w, const float *row, float factor, int64_t expert, int64_t position, Round &r) {
  const int64_t first = r.start[expert], count = r.start[expert + 1] - first;
  if (!is_float(w.codes)) {
    quantize_row(w, row, factor, position - first, count, r.codes + first * row_codes(w), r.scales + first * row_scales(w));
    return;
  }
  float *out = r.rows + position * w.columns;
  for (int64_t k = 0; k < w.columns; k++) out[k] = row[k] * factor;
}

void gather(const Experts &e, int64_t first_token, Round &r, const Worker &worker) {
  int64_t begin, end, expert = 0;
  share(r.start[e.count], 1, worker, begin, end);
  for (int64_t p = begin; p < end; p++) {
    while (r.start[expert + 1] <= p) expert++;
    const int64_t assignment = first_token * e.top_k + r.order[p];
    const float factor = e.weight_on_input ? e.weights[assignment] : 1.f;
    put_row(*e.gate_up[expert], e.x + assignment / e.top_k * e.hidden, factor, expert, p, r);
  }
}

void activate_rows(const Experts &e, Round &r, float *copy, const Worker &worker) {
  int64_t begin, end, expert = 0;
  share(r.start[e.count], 1, worker, begin, end);
  for (int64_t p = begin; p < end; p++) {
    while (r.start[expert + 1] <= p) expert++;
    const float *up = r.up + p * e.up_rows();
    if (e.gated) gate(e.kind)(up, up + e.inner, copy, e.inner, e.limit, e.up_offset);
    else activation(e.kind)(up, copy, e.inner);
    put_row(*e.down[expert], copy, 1.f, expert, p, r);
  }
}

// One matrix of every expert that has rows, in pieces for whoever is free.
void multiply_all(const hp_weight *const *weights, const float *bias, float *out, const Round &r, char *own,
                  const Worker &worker) {
  const int64_t actives = *r.actives;
  if (!actives) return;
  const int64_t width = weights[r.active[0]]->rows, panels = weights[r.active[0]]->panels;
  const int64_t pieces = panels < 8 * worker.threads ? panels : 8 * worker.threads;
  for (int64_t item; (item = worker.next_work()) < actives * pieces;) {
    const int64_t expert = r.active[item / pieces], piece = item % pieces, first = r.start[expert];
    const hp_weight &w = *weights[expert];
    const Rows rows{r.start[expert + 1] - first, r.rows + first * w.columns, w.columns, r.codes + first * row_codes(w),
                    r.scales + first * row_scales(w)};
    const Result result{out + first * width, width, bias ? bias + expert * width : nullptr, nullptr, 0};
    multiply(w, panels * piece / pieces, panels * (piece + 1) / pieces, -1, rows, result, own);
  }
}

void add_up(const Experts &e, int64_t first_token, int64_t tokens, const Round &r, const Worker &worker) {
  int64_t begin, end;
  share(tokens, 1, worker, begin, end);
  for (int64_t t = begin; t < end; t++) {
    const int64_t token = first_token + t;
    float *out = e.out + token * e.hidden;
    std::memset(out, 0, (std::size_t)e.hidden * 4);
    for (int64_t slot = 0; slot < e.top_k; slot++) {
      const int64_t position = r.position[t * e.top_k + slot];
      if (position < 0) continue;
      const float share_of_slot = e.weight_on_input ? 1.f : e.weights[token * e.top_k + slot];
      const float *result = r.result + position * e.hidden;
      int64_t k = 0;
      for (; k + W <= e.hidden; k += W) store(out + k, load(out + k) + load(result + k) * splat(share_of_slot));
      for (; k < e.hidden; k++) out[k] = out[k] + result[k] * share_of_slot;
    }
  }
}

}  // namespace

// p0 x [rows, i0], p1 weights [rows, i3], p2 ids int64 [rows, i3], p3 hp_weight *gate_up[i2] (rows: gate, then up), p4
// hp_weight *down[i2], p5 out [rows, i0], p6 bias [i2, rows of gate_up] or NULL, p7 bias [i2, i0] or NULL; i0 hidden, i1
// intermediate, i2 experts, i3 top_k, i4 kind (activation.h), i5 gated, i6 weight on the input; f0 limit (0: none), f1 added
// to up. Ids outside [0, i2) add nothing.
void experts(const hp_op &op, int64_t tokens, const hp_batch *, const Worker &worker) {
  const Experts e(op);
  const Sizes sizes = sizes_of(e);
  const int64_t fit = kAssignments / (e.top_k < 1 ? 1 : e.top_k), most = fit < 1 ? 1 : fit;
  for (int64_t first = 0; first < tokens; first += most) {
    const int64_t now = tokens - first < most ? tokens - first : most, assignments = now * e.top_k;
    Round r;
    const int64_t bytes = lay_out(e, sizes, assignments, nullptr, r);
    lay_out(e, sizes, assignments, worker.shared_scratch((std::size_t)bytes), r);
    float *copy = (float *)worker.scratch((std::size_t)((e.inner * 4 + 63) / 64 * 64 + sizes.own));
    char *own = (char *)copy + (e.inner * 4 + 63) / 64 * 64;
    if (worker.thread == 0) sort(e, e.ids + first * e.top_k, assignments, r);
    worker.reset_work();
    gather(e, first, r, worker);
    worker.barrier();
    multiply_all(e.gate_up, e.gate_up_bias, r.up, r, own, worker);
    worker.reset_work();
    activate_rows(e, r, copy, worker);
    worker.barrier();
    multiply_all(e.down, e.down_bias, r.result, r, own, worker);
    worker.barrier();
    add_up(e, first, now, r, worker);
  }
}

HP_END
