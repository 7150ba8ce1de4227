// Float weights: each lane is a row and adds its products in the order of the columns.
#include "gemm.h"

HP_BEGIN

namespace {

#if defined(__AVX512F__)
constexpr int kFloatTile = 8;
#elif defined(__AVX2__)
constexpr int kFloatTile = 6;
#elif defined(__ARM_NEON)
constexpr int kFloatTile = 4;
#else
constexpr int kFloatTile = 2;
#endif

template <Codes K>
static inline vf load_weights(const char *p, int r) {
  if constexpr (K == Codes::kF32) return load((const float *)p + r * W);
  else if constexpr (K == Codes::kF16) return load_half((const uint16_t *)p + r * W);
  else return load_bf16((const uint16_t *)p + r * W);
}

template <Codes K, int C>
void tile(const char *w, int64_t columns, const float *x, int64_t stride, float *out) {
  vf acc[C][kVectors] = {};
  for (int64_t k = 0; k < columns; k++, w += (K == Codes::kF32 ? 4 : 2) * kRows) {
    vf weights[kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kVectors; r++) weights[r] = load_weights<K>(w, r);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      const vf activation = splat(x[c * stride + k]);
#pragma GCC unroll 4
      for (int r = 0; r < kVectors; r++) acc[c][r] = fma(weights[r], activation, acc[c][r]);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < C; c++)
#pragma GCC unroll 4
    for (int r = 0; r < kVectors; r++) store(out + c * kRows + r * W, acc[c][r]);
}

using Tile = void (*)(const char *, int64_t, const float *, int64_t, float *);

template <Codes K, int C>
Tile tile_of_width(int64_t width) {
  if constexpr (C > 1) {
    if (width < C) return tile_of_width<K, C - 1>(width);
  }
  return tile<K, C>;
}

Tile tile_of(Codes codes, int64_t width) {
  switch (codes) {
    case Codes::kF32: return tile_of_width<Codes::kF32, kFloatTile>(width);
    case Codes::kF16: return tile_of_width<Codes::kF16, kFloatTile>(width);
    default: return tile_of_width<Codes::kBF16, kFloatTile>(width);
  }
}

constexpr int64_t kPass = 96 / kFloatTile * kFloatTile;  // rows per pass over the panels

}  // namespace

void multiply_float(const hp_weight &w, int64_t begin, int64_t end, const Rows &rows, const Result &result) {
  const int64_t panel_bytes = w.units * unit_bytes(w.codes);
  for (int64_t from = 0; from < rows.count; from += kPass) {
    const int64_t to = from + kPass < rows.count ? from + kPass : rows.count;
    for (int64_t panel = begin; panel < end; panel++)
      for (int64_t row = from; row < to; row += kFloatTile) {
        const int64_t width = to - row < kFloatTile ? to - row : kFloatTile;
        alignas(64) float sums[kFloatTile * kRows];
        tile_of(w.codes, width)(w.code_data + panel * panel_bytes, w.columns, rows.x + row * rows.stride, rows.stride, sums);
        emit(w, panel, row, (int)width, sums, result);
      }
  }
}

HP_END
