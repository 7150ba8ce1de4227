// Reading the neutral form of a matrix, number by number (see `QuantTensor` in hardpoint_platforms/quant.py).
#pragma once

#include <initializer_list>

#include "gemm_dot.h"

HP_BEGIN

static inline float number(const void *data, int32_t dtype, int64_t at) {
  switch (dtype) {
    case HP_F32: return ((const float *)data)[at];
    case HP_F16: return half_to_float(((const uint16_t *)data)[at]);
    case HP_BF16: return bf16_to_float(((const uint16_t *)data)[at]);
    case HP_I8: return (float)((const int8_t *)data)[at];
    default: return (float)((const uint8_t *)data)[at];
  }
}

struct Source {
  const hp_matrix &m;
  int64_t groups;  // per row
  int64_t supers;  // second-level scales per row, 0: one level

  explicit Source(const hp_matrix &matrix) : m(matrix), groups(1), supers(0) {
    if (!m.packing) return;
    if (m.group > 0 && m.group < m.columns) groups = m.columns / m.group;
    if (m.super_scales && m.super_group > 0) supers = groups < m.super_group ? 1 : groups / m.super_group;
  }

  // Whether this is a matrix that can be read at all.
  bool valid() const {
    if (m.rows <= 0 || m.columns <= 0 || !m.values || m.packing < 0 || m.packing > 2) return false;
    if (!m.packing) return m.values_dtype == HP_F32 || m.values_dtype == HP_F16 || m.values_dtype == HP_BF16;
    if (!m.scales || (m.super_scales && m.super_group <= 0) || (m.super_offsets && !m.super_scales)) return false;
    if (m.packing == 2 && m.columns % 2) return false;
    if (groups > 1 && m.columns % m.group) return false;
    if (supers > 1 && groups % m.super_group) return false;
    for (int32_t dtype : {m.scales_dtype, m.offsets_dtype, m.super_scales_dtype, m.super_offsets_dtype})
      if (dtype < HP_F32 || dtype > HP_U8) return false;
    return true;
  }

  // Whether scales fall on blocks or halves of blocks.
  bool fits_blocks() const { return groups == 1 || m.group % kBlock == 0 || m.group == kBlock / 2; }

  float scale(int64_t row, int64_t g) const {
    const float fine = number(m.scales, m.scales_dtype, row * groups + g);
    return m.super_scales ? fine * number(m.super_scales, m.super_scales_dtype, row * supers + g / m.super_group) : fine;
  }
  float offset(int64_t row, int64_t g) const {
    const float fine = number(m.offsets, m.offsets_dtype, row * groups + g);
    return m.super_offsets ? fine * number(m.super_offsets, m.super_offsets_dtype, row * supers + g / m.super_group) : fine;
  }

  // A row as float32: [columns].
  void dequantize(int64_t row, float *out) const {
    const int64_t group = groups == 1 ? m.columns : m.group;
    for (int64_t g = 0; g < groups; g++) {
      const float d = scale(row, g), o = m.offsets ? offset(row, g) : 0.f;
      for (int64_t k = g * group; k < (g + 1) * group; k++) {
        float code;
        if (m.packing == 2) {
          const int stored = ((const uint8_t *)m.values)[row * (m.columns / 2) + k / 2] >> 4 * (k & 1) & 15;
          code = m.codebook ? m.codebook[stored] : (float)stored;
        } else {
          const int stored = ((const int8_t *)m.values)[row * m.columns + k];
          code = m.codebook ? m.codebook[stored + 128] : (float)stored;
        }
        out[k] = code * d + o;
      }
    }
  }
};

HP_END
