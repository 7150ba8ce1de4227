// Normalization and rope: a row (or a head of a row) at a time.
//
// Sums of a row go through four vectors in turn, joined as (0 + 1) + (2 + 3), then over the lanes: an order that
// follows from the width alone.
#include "../simd.h"

HP_BEGIN

namespace {

enum NormKind { RMS = 0, RMS1P = 1, LN = 2, L2 = 3 };

// The sum of value(k, vector) over a row; `value` maps W numbers to what is summed, zeros to be ignored at the tail.
template <class Value>
inline float row_sum(const float *x, int64_t n, Value value) {
  vf part[4] = {};
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int k = 0; k < 4; k++) part[k] = value(part[k], load(x + i + k * W));
  for (int k = 0; i + W <= n; i += W, k++) part[k] = value(part[k], load(x + i));
  float total = sum((part[0] + part[1]) + (part[2] + part[3]));
  for (; i < n; i++) total = value(splat(total), splat(x[i]))[0];
  return total;
}

// out = (x - mean) * factor * (weight + one) + bias; weight and bias may be NULL, out may be x.
inline void apply(const float *x, float mean, float factor, const float *weight, float one, const float *bias,
                  float *out, int64_t n) {
  const vf middle = splat(mean), by = splat(factor), more = splat(one);
  for (int64_t i = 0; i < n; i += W) {
    const int left = n - i < W ? (int)(n - i) : W;
    const auto get = [&](const float *p) { return left == W ? load(p + i) : load_part(p + i, left); };
    vf v = (get(x) - middle) * by;
    if (weight) v = v * (get(weight) + more);
    if (bias) v = v + get(bias);
    if (left == W) store(out + i, v);
    else store_part(out + i, v, left);
  }
}

void norm_row(const float *x, const float *weight, const float *bias, float *out, int64_t n, int64_t kind, float eps) {
  float mean = 0;
  if (kind == LN) mean = row_sum(x, n, [](vf s, vf v) { return s + v; }) / (float)n;
  const vf middle = splat(mean);
  const float squares = row_sum(x, n, [middle](vf s, vf v) { return fma(v - middle, v - middle, s); });
  const float energy = kind == L2 ? squares : squares / (float)n;
  apply(x, mean, 1.f / std::sqrt(energy + eps), weight, kind == RMS1P ? 1.f : 0.f, bias, out, n);
}

// p0 x, p1 weight, p2 bias, p3 out; i0 width, i1 kind, i2 inner (heads per row), i3 x row stride, i4 x inner stride,
// i5 out row stride, i6 out inner stride, i7 weight inner stride (0: one weight for all heads); f0 eps. In place allowed.
void norm(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  const float *x = (const float *)op.p[0], *weight = (const float *)op.p[1], *bias = (const float *)op.p[2];
  float *out = (float *)op.p[3];
  const int64_t width = op.i[0], inner = op.i[2] > 0 ? op.i[2] : 1;
  int64_t begin, end;
  share(rows * inner, 1, w, begin, end);
  for (int64_t item = begin; item < end; item++) {
    const int64_t row = item / inner, head = item % inner;
    norm_row(x + row * op.i[3] + head * op.i[4], weight ? weight + head * op.i[7] : nullptr, bias,
             out + row * op.i[5] + head * op.i[6], width, op.i[1], op.f[0]);
  }
}

// p0 x, p1 residual, p2 weight, p3 bias, p4 normed out, p5 new residual out (may be p0 or p1); i0 width, i1 kind; f0 eps
void add_norm(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  const int64_t width = op.i[0];
  int64_t begin, end;
  share(rows, 1, w, begin, end);
  for (int64_t r = begin; r < end; r++) {
    const float *x = (const float *)op.p[0] + r * width, *residual = (const float *)op.p[1] + r * width;
    float *total = (float *)op.p[5] + r * width;
    int64_t i = 0;
    for (; i + W <= width; i += W) store(total + i, load(x + i) + load(residual + i));
    for (; i < width; i++) total[i] = x[i] + residual[i];
    norm_row(total, (const float *)op.p[2], (const float *)op.p[3], (float *)op.p[4] + r * width, width, op.i[1],
             op.f[0]);
  }
}

// --- rope ---

// Neighbours change places: 1 0 3 2 ...
inline vf swap_pairs(vf v) {
  typedef uint64_t pairs __attribute__((vector_size(W * 4)));
  const pairs p = (pairs)v;
  return (vf)((p << 32) | (p >> 32));
}

// One row's angles: pairs (i, i + half) take cos and sin as they are. Interleaved pairs (2i, 2i + 1) take every
// cosine twice, and sines as -sin, sin, so that x * cos + swapped x * sin turns both.
struct Turn {
  const float *cos, *sin;
  int64_t half;
  bool interleaved;
};

inline void turn_halves(const Turn &t, const float *x, float *out) {
  int64_t i = 0;
  for (; i + W <= t.half; i += W) {
    const vf low = load(x + i), high = load(x + t.half + i), c = load(t.cos + i), s = load(t.sin + i);
    store(out + i, low * c - high * s);
    store(out + t.half + i, high * c + low * s);
  }
  for (; i < t.half; i++) {
    const float low = x[i], high = x[t.half + i];
    out[i] = low * t.cos[i] - high * t.sin[i];
    out[t.half + i] = high * t.cos[i] + low * t.sin[i];
  }
}

inline void turn_pairs(const Turn &t, const float *x, float *out) {
  const int64_t n = 2 * t.half;
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const vf v = load(x + i);
    store(out + i, v * load(t.cos + i) + swap_pairs(v) * load(t.sin + i));
  }
  for (; i < n; i += 2) {
    const float even = x[i], odd = x[i + 1];
    out[i] = even * t.cos[i] + odd * t.sin[i];
    out[i + 1] = odd * t.cos[i + 1] + even * t.sin[i + 1];
  }
}

// Heads of one row, contiguous. What is not turned is copied where out is another buffer.
inline void turn_row(const Turn &t, const float *x, float *out, int64_t heads, int64_t size, int64_t start) {
  const int64_t stop = start + 2 * t.half;
  for (int64_t h = 0; h < heads; h++, x += size, out += size) {
    if (x != out) {
      std::memcpy(out, x, sizeof(float) * (std::size_t)start);
      std::memcpy(out + stop, x + stop, sizeof(float) * (std::size_t)(size - stop));
    }
    if (t.interleaved) turn_pairs(t, x + start, out + start);
    else turn_halves(t, x + start, out + start);
  }
}

// p0 q, p1 k, p2 positions int64[rows], p3 table [positions, i2] (cos halves | sin halves), p4 q out, p5 k out; i0 heads,
// i1 kv heads, i2 rotary_dim, i3 head_dim, i4 interleaved, i5 tail, i6 q row stride, i7 k row stride, i8 q out row stride,
// i9 k out row stride; heads contiguous inside a row, in place allowed. p1 NULL: no k.
void rope(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  const int64_t *positions = (const int64_t *)op.p[2];
  const int64_t half = op.i[2] / 2, size = op.i[3], start = op.i[5] ? size - op.i[2] : 0;
  const bool interleaved = op.i[4] != 0;
  float *twice = interleaved ? (float *)w.scratch(sizeof(float) * (std::size_t)(4 * half)) : nullptr;
  int64_t begin, end;
  share(rows, 1, w, begin, end);
  for (int64_t r = begin; r < end; r++) {
    const float *cos = (const float *)op.p[3] + positions[r] * op.i[2], *sin = cos + half;
    if (interleaved) {
      for (int64_t i = 0; i < half; i++) {
        twice[2 * i] = twice[2 * i + 1] = cos[i];
        twice[2 * half + 2 * i] = -sin[i];
        twice[2 * half + 2 * i + 1] = sin[i];
      }
      cos = twice;
      sin = twice + 2 * half;
    }
    const Turn turn{cos, sin, half, interleaved};
    turn_row(turn, (const float *)op.p[0] + r * op.i[6], (float *)op.p[4] + r * op.i[8], op.i[0], size, start);
    if (op.p[1]) turn_row(turn, (const float *)op.p[1] + r * op.i[7], (float *)op.p[5] + r * op.i[9], op.i[1], size, start);
  }
}

}  // namespace

void add_norm_kernels(KernelTable &table) {
  table.run[HP_NORM] = norm;
  table.run[HP_ADD_NORM] = add_norm;
  table.run[HP_ROPE] = rope;
}

HP_END
