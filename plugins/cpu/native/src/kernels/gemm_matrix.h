// The integer products of rows of activations in pairs, by ARM's matrix instructions (i8mm): 2 rows of a panel by 8 columns
// times 2 rows of activations ("tokens") by 8 columns are 2 x 2 sums, 32 multiplications where `vdotq_s32` has 16.
//
//   2 x 2   four lanes: row 0 by token 0, row 0 by token 1, row 1 by token 0, row 1 by token 1
//
// Floats are added up in those lanes too, and put in the panel's order at its end. Every lane has the operations that `tile`
// (gemm_integer.cpp) has for its number, in the same order, so that results are the same bits.
#pragma once

#include "gemm_dot.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)

HP_BEGIN

constexpr int kRowPairs = kRows / 2;

// Rows 8 * half to 8 * half + 7 of two neighbouring slices: two rows by 8 columns in each part.
static inline Slice interleave(Slice left, Slice right, int half) {
  Slice out;
  for (int q = 0; q < 2; q++) {
    const int32x4_t a = vreinterpretq_s32_s8(left.v[2 * half + q]), b = vreinterpretq_s32_s8(right.v[2 * half + q]);
    out.v[2 * q] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
    out.v[2 * q + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
  }
  return out;
}

// A number of each of two rows as lanes of a 2 x 2: rows 2i and 2i + 1 of the four in `v`.
static inline vf by_rows(vf v, int i) {
  const float32x4_t four = (float32x4_t)v;
  return (vf)(i ? vzip2q_f32(four, four) : vzip1q_f32(four, four));
}

// One block of C tokens, in pairs. The last of an odd number is its own neighbour; nobody reads those lanes.
template <int C>
struct Tokens {
  static constexpr int kPairs = (C + 1) / 2;

  int8x16_t x[2][2][kPairs];  // [half of the block][8 columns]: those of the first token, those of the second
  vf scale[2][kPairs];        // [half], in the lanes of a 2 x 2
  vf sum[2][kPairs];          // scale * sum of codes, of the block or of each half
  vi start[2][kPairs];        // what the integer sums of each half start from
};

// Numbers of tokens 2c and 2c + 1 as lanes of a 2 x 2.
template <int C>
static inline vf by_tokens(const float *s, int c) {
  if (2 * c + 1 == C) return (vf)vdupq_n_f32(s[2 * c]);
  const float32x2_t two = vld1_f32(s + 2 * c);
  return (vf)vcombine_f32(two, two);
}

// x [C][32], s [which][C]
template <bool Halves, bool Offset, bool Based, int C>
__attribute__((always_inline)) static inline void load_tokens(Tokens<C> &t, const int8_t *x, const float *s) {
#pragma GCC unroll kUnroll
  for (int c = 0; c < Tokens<C>::kPairs; c++) {
    const int8_t *first = x + 2 * c * kBlock, *second = 2 * c + 1 == C ? first : first + kBlock;
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(first + part * kBlock / 2));
      const int64x2_t b = vreinterpretq_s64_s8(vld1q_s8(second + part * kBlock / 2));
      t.x[part][0][c] = vreinterpretq_s8_s64(vzip1q_s64(a, b));
      t.x[part][1][c] = vreinterpretq_s8_s64(vzip2q_s64(a, b));
      t.scale[part][c] = by_tokens<C>(s + part * C, c);
      if (Offset && (Halves || !part)) t.sum[part][c] = by_tokens<C>(s + (2 + part) * C, c);
      if (Based) t.start[part][c] = (vi)by_tokens<C>(s + ((Halves ? 4 : 3) + part) * C, c);
    }
  }
}

// acc [pair][row pair][2 x 2] to out [C][16].
template <int C>
static inline void separate(const float *acc, float *out) {
  for (int c = 0; c < C; c++)
    for (int q = 0; q < kRows / 4; q++) {
      const float *at = acc + (c / 2 * kRowPairs + 2 * q) * W;
      const float32x4_t a = vld1q_f32(at), b = vld1q_f32(at + W);
      vst1q_f32(out + c * kRows + 4 * q, c % 2 ? vuzp2q_f32(a, b) : vuzp1q_f32(a, b));
    }
}

HP_END

#endif
