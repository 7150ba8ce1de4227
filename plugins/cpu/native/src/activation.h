// Activation functions on vectors, plain and gated. The codes are the order of the contract `activation`.
// Include only from files compiled per variant.
#pragma once

#include "simd.h"

HP_BEGIN

enum ActivationKind {
  SILU = 0,
  GELU = 1,
  GELU_TANH = 2,
  GELU_QUICK = 3,
  RELU = 4,
  RELU2 = 5,
  SIGMOID = 6,
  TANH = 7,
  SOFTPLUS = 8
};

static inline vf vabs(vf x) { return (vf)((vi)x & splat_int(0x7fffffff)); }

static inline vf vsigmoid(vf x) { return splat(1.f) / (splat(1.f) + vexp(-x)); }

// Relative error below 2^-21: a polynomial (Cephes) near 0, where 1 - 2 / (e^2x + 1) would cancel.
static inline vf vtanh(vf x) {
  const vf size = vabs(x), square = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = fma(p, square, splat(2.06390887954e-2f));
  p = fma(p, square, splat(-5.37397155531e-2f));
  p = fma(p, square, splat(1.33314422036e-1f));
  p = fma(p, square, splat(-3.33332819422e-1f));
  const vf near = fma(p * square, x, x);
  const vf far = splat(1.f) - splat(2.f) / (vexp(size + size) + splat(1.f));
  const vf signed_far = (vf)((vi)far | ((vi)x & splat_int((int32_t)0x80000000)));
  return select(size < splat(0.625f), near, signed_far);
}

// The normal distribution's Phi(x) through erfc (Abramowitz and Stegun 7.1.26), absolute error below 1e-7.
static inline vf vphi(vf x) {
  const vf z = vabs(x) * splat(0.70710678f);
  const vf t = splat(1.f) / fma(z, splat(0.3275911f), splat(1.f));
  vf p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  const vf tail = splat(0.5f) * p * t * vexp(-z * z);
  return select(x < vf{}, tail, splat(1.f) - tail);
}

// log(1 + e^x) = max(x, 0) + log(1 + y) with y = e^-|x|, and log(1 + y) = 2 artanh(y / (2 + y)).
static inline vf vsoftplus(vf x) {
  const vf y = vexp(-vabs(x));
  const vf s = y / (y + splat(2.f)), square = s * s;
  vf p = splat(1.f / 15.f);
  for (int k = 13; k >= 1; k -= 2) p = fma(p, square, splat(1.f / (float)k));
  return vmax(vf{}, x) + splat(2.f) * s * p;
}

template <int Kind>
static inline vf activate(vf x) {
  switch (Kind) {
    case SILU: return x / (splat(1.f) + vexp(-x));
    case GELU: return x * vphi(x);
    case GELU_TANH: {
      const vf twice = splat(1.5957691216f) * fma(x * x * x, splat(0.044715f), x);
      return x / (splat(1.f) + vexp(-twice));
    }
    case GELU_QUICK: return x / (splat(1.f) + vexp(splat(-1.702f) * x));
    case RELU: return vmax(vf{}, x);
    case RELU2: { const vf up = vmax(vf{}, x); return up * up; }
    case SIGMOID: return vsigmoid(x);
    case TANH: return vtanh(x);
    default: return vsoftplus(x);
  }
}

// out[i] = activation(x[i]); in place allowed.
template <int Kind>
static inline void activate_row(const float *x, float *out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, activate<Kind>(load(x + i)));
  if (i < n) store_part(out + i, activate<Kind>(load_part(x + i, (int)(n - i))), (int)(n - i));
}

// out[i] = activation(min(gate[i], limit)) * (clamp(up[i], -limit, limit) + offset); limit 0: none. In place allowed.
template <int Kind>
static inline void gate_row(const float *gate, const float *up, float *out, int64_t n, float limit, float offset) {
  const vf high = splat(limit > 0 ? limit : __builtin_inff()), low = -high, more = splat(offset);
  for (int64_t i = 0; i < n; i += W) {
    const int left = n - i < W ? (int)(n - i) : W;
    const vf g = left == W ? load(gate + i) : load_part(gate + i, left);
    const vf u = left == W ? load(up + i) : load_part(up + i, left);
    const vf result = activate<Kind>(vmin(high, g)) * (vmin(high, vmax(low, u)) + more);
    if (left == W) store(out + i, result);
    else store_part(out + i, result, left);
  }
}

using ActivateRow = void (*)(const float *x, float *out, int64_t n);
using GateRow = void (*)(const float *gate, const float *up, float *out, int64_t n, float limit, float offset);

static inline ActivateRow activation(int64_t kind) {
  static constexpr ActivateRow rows[] = {activate_row<SILU>,    activate_row<GELU>,  activate_row<GELU_TANH>,
                                         activate_row<GELU_QUICK>, activate_row<RELU>, activate_row<RELU2>,
                                         activate_row<SIGMOID>, activate_row<TANH>,  activate_row<SOFTPLUS>};
  return rows[kind];
}
static inline GateRow gate(int64_t kind) {
  static constexpr GateRow rows[] = {gate_row<SILU>,  gate_row<GELU>,    gate_row<GELU_TANH>, gate_row<GELU_QUICK>,
                                     gate_row<RELU>,  gate_row<RELU2>,   gate_row<SIGMOID>,   gate_row<TANH>,
                                     gate_row<SOFTPLUS>};
  return rows[kind];
}

HP_END
