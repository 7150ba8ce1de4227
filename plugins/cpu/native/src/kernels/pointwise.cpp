// Kernels that treat each row, or each number, on its own: look-up, activations, copies, sums of rows.
// (norm.cpp: normalization and rope.)
//
// Work is shared out as (row, block of columns), so that one wide row keeps every thread busy and many narrow rows
// need no arithmetic to be dealt out. No barrier: nobody reads what another thread writes.
#include "../activation.h"

HP_BEGIN

namespace {

constexpr int64_t kBlock = 2048;  // columns; below that a row is not cut, a thread's start costs more

// body(row, first column, columns) for this thread's part of rows x width.
template <class Body>
inline void for_blocks(int64_t rows, int64_t width, const Worker &w, Body body) {
  const int64_t blocks = (width + kBlock - 1) / kBlock;
  int64_t begin, end;
  share(rows * blocks, 1, w, begin, end);
  for (int64_t item = begin; item < end; item++) {
    const int64_t row = item / blocks, first = item % blocks * kBlock;
    body(row, first, width - first < kBlock ? width - first : kBlock);
  }
}

// --- EMBED: rows of a table, dequantized on look-up ---

inline float number(const void *p, int64_t i, int32_t dtype) {
  switch (dtype) {
    case HP_F16: return half_to_float(((const uint16_t *)p)[i]);
    case HP_BF16: return bf16_to_float(((const uint16_t *)p)[i]);
    case HP_I8: return (float)((const int8_t *)p)[i];
    case HP_U8: return (float)((const uint8_t *)p)[i];
    default: return ((const float *)p)[i];
  }
}

// scales[row, group] * super_scales[row, group / super_group]
inline float two_level(const hp_matrix &m, const void *fine, int32_t fine_type, const void *coarse,
                       int32_t coarse_type, int64_t row, int64_t group) {
  const int64_t groups = m.columns / m.group;
  const float value = number(fine, row * groups + group, fine_type);
  if (!coarse) return value;
  return value * number(coarse, row * (groups / m.super_group) + group / m.super_group, coarse_type);
}

void plain_row(const hp_matrix &m, int64_t row, float *out) {
  const int64_t n = m.columns;
  int64_t c = 0;
  if (m.values_dtype == HP_F16) {
    const uint16_t *p = (const uint16_t *)m.values + row * n;
    for (; c + W <= n; c += W) store(out + c, load_half(p + c));
  } else if (m.values_dtype == HP_BF16) {
    const uint16_t *p = (const uint16_t *)m.values + row * n;
    for (; c + W <= n; c += W) store(out + c, load_bf16(p + c));
  } else if (m.values_dtype == HP_F32) {
    std::memcpy(out, (const float *)m.values + row * n, sizeof(float) * (std::size_t)n);
    return;
  }
  for (; c < n; c++) out[c] = number(m.values, row * n + c, m.values_dtype);
}

void codes_of_row(const hp_matrix &m, int64_t row, float *out) {
  if (m.packing == 2) {
    const uint8_t *p = (const uint8_t *)m.values + row * (m.columns / 2);
    for (int64_t c = 0; c < m.columns; c += 2) {
      const int low = p[c / 2] & 15, high = p[c / 2] >> 4;
      out[c] = m.codebook ? m.codebook[low] : (float)low;
      out[c + 1] = m.codebook ? m.codebook[high] : (float)high;
    }
    return;
  }
  const int8_t *p = (const int8_t *)m.values + row * m.columns;
  if (m.codebook) {
    for (int64_t c = 0; c < m.columns; c++) out[c] = m.codebook[p[c] + 128];
  } else {
    for (int64_t c = 0; c < m.columns; c++) out[c] = (float)p[c];
  }
}

void table_row(const hp_matrix &m, int64_t row, float *out) {
  if (m.packing == 0) return plain_row(m, row, out);
  codes_of_row(m, row, out);
  for (int64_t g = 0; g * m.group < m.columns; g++) {
    const float scale = two_level(m, m.scales, m.scales_dtype, m.super_scales, m.super_scales_dtype, row, g);
    const float offset =
        m.offsets ? two_level(m, m.offsets, m.offsets_dtype, m.super_offsets, m.super_offsets_dtype, row, g) : 0.f;
    float *part = out + g * m.group;
    for (int64_t c = 0; c < m.group; c++) part[c] = part[c] * scale + offset;
  }
}

// p0 ids int64[rows], p1 hp_matrix* (table), p2 out [rows, i0]; i0 width; f0 scale.
// An id outside the table gives NaN, which the check behind sampling reports.
void embed(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  const int64_t *ids = (const int64_t *)op.p[0];
  const hp_matrix &table = *(const hp_matrix *)op.p[1];
  const int64_t width = op.i[0];
  const float scale = op.f[0];
  int64_t begin, end;
  share(rows, 1, w, begin, end);
  for (int64_t r = begin; r < end; r++) {
    float *out = (float *)op.p[2] + r * width;
    if (ids[r] < 0 || ids[r] >= table.rows) {
      for (int64_t c = 0; c < width; c++) out[c] = __builtin_nanf("");
      continue;
    }
    table_row(table, ids[r], out);
    if (scale != 1.f)
      for (int64_t c = 0; c < width; c++) out[c] *= scale;
  }
}

// --- copies and sums ---

// p0 index int64[rows], p1 source, p2 out; i0 width, i1 source stride, i2 out stride. out[r] = source[index[r]]
void gather(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  const int64_t *index = (const int64_t *)op.p[0];
  for_blocks(rows, op.i[0], w, [&](int64_t row, int64_t first, int64_t n) {
    std::memcpy((float *)op.p[2] + row * op.i[2] + first, (const float *)op.p[1] + index[row] * op.i[1] + first,
                sizeof(float) * (std::size_t)n);
  });
}

// p0 x, p1 out; i0 width, i1 x stride, i2 out stride
void copy(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  for_blocks(rows, op.i[0], w, [&](int64_t row, int64_t first, int64_t n) {
    std::memmove((float *)op.p[1] + row * op.i[2] + first, (const float *)op.p[0] + row * op.i[1] + first,
                 sizeof(float) * (std::size_t)n);
  });
}

// p0 a, p1 b, p2 out (may be either); i0 width. Rows contiguous.
void add(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  for_blocks(rows, op.i[0], w, [&](int64_t row, int64_t first, int64_t n) {
    const int64_t at = row * op.i[0] + first;
    const float *a = (const float *)op.p[0] + at, *b = (const float *)op.p[1] + at;
    float *out = (float *)op.p[2] + at;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, load(a + i) + load(b + i));
    for (; i < n; i++) out[i] = a[i] + b[i];
  });
}

// p0 x in place; i0 width, i1 stride; f0 scale, f1 softcap (0 none): cap * tanh(x * scale / cap)
void scale_cap(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  const float cap = op.f[1];
  const vf scale = splat(op.f[0]);
  const auto result = [&](vf x) { return cap > 0 ? vtanh(x * scale / splat(cap)) * splat(cap) : x * scale; };
  for_blocks(rows, op.i[0], w, [&](int64_t row, int64_t first, int64_t n) {
    float *x = (float *)op.p[0] + row * op.i[1] + first;
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, result(load(x + i)));
    if (i < n) store_part(x + i, result(load_part(x + i, (int)(n - i))), (int)(n - i));
  });
}

// --- activations ---

// p0 x, p1 out; i0 width, i1 kind, i2 x stride, i3 out stride
void activate_op(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  const ActivateRow run = activation(op.i[1]);
  for_blocks(rows, op.i[0], w, [&](int64_t row, int64_t first, int64_t n) {
    run((const float *)op.p[0] + row * op.i[2] + first, (float *)op.p[1] + row * op.i[3] + first, n);
  });
}

// p0 x [rows, 2 * i0] (gate | up), p1 out [rows, i0]; i0 width, i1 kind, i2 x stride, i3 out stride;
// f0 limit (0 none), f1 added to up
void gated_op(const hp_op &op, int64_t rows, const hp_batch *, const Worker &w) {
  const GateRow run = gate(op.i[1]);
  for_blocks(rows, op.i[0], w, [&](int64_t row, int64_t first, int64_t n) {
    const float *x = (const float *)op.p[0] + row * op.i[2] + first;
    run(x, x + op.i[0], (float *)op.p[1] + row * op.i[3] + first, n, op.f[0], op.f[1]);
  });
}

}  // namespace

void add_norm_kernels(KernelTable &);

void add_pointwise(KernelTable &table) {
  table.run[HP_EMBED] = embed;
  table.run[HP_GATHER] = gather;
  table.run[HP_COPY] = copy;
  table.run[HP_ADD] = add;
  table.run[HP_SCALE_CAP] = scale_cap;
  table.run[HP_ACTIVATE] = activate_op;
  table.run[HP_GATED] = gated_op;
  add_norm_kernels(table);
}

HP_END
