// Integer weights times int8 activations.
#include <type_traits>

#include "gemm.h"
#include "gemm_matrix.h"

HP_BEGIN

namespace {

// One panel as the tiles read it.
struct Panel {
  const uint8_t *codes;
  const float *scales;   // [blocks / blocks_per_scale][16], or [blocks][2][16] for halves
  const float *offsets;  // likewise, where the weight has them
  int64_t blocks;
  int64_t blocks_per_scale;
  const int8_t *table;
  const uint8_t *ahead;  // what to fetch into the cache meanwhile: `ahead_step` bytes for each block
  int64_t ahead_step;
};

static inline Slice nibbles(const uint8_t *block, int v) {
  const Slice both = load_slice(block + (v & 3) * kSliceBytes);
  return v < 4 ? low_nibbles(both) : high_nibbles(both);
}

// Slice v of a block as it was stored.
template <Codes K>
static inline Slice stored(const uint8_t *block, int v, const int8_t *table) {
  if constexpr (K == Codes::kU4) return nibbles(block, v);
  else if constexpr (K == Codes::kU5) return join5(nibbles(block, v), load_slice(block + 4 * kSliceBytes), v);
  else if constexpr (K == Codes::kU6) return join6(nibbles(block, v), load_slice(block + (4 + v / 4) * kSliceBytes), v & 3);
  else if constexpr (K == Codes::kI8 || K == Codes::kBytes6) return load_slice(block + v * kSliceBytes);
  else return look_up(nibbles(block, v), table);
}

// Slice v of a block, ready to be multiplied.
template <Codes K>
static inline auto fetch(const uint8_t *block, int v, const int8_t *table) {
  if constexpr (K == Codes::kU4 || is_based(K)) return stored<K>(block, v, table);
  else return as_signed(stored<K>(block, v, table));
}

// Before block b: fetches a share of what is read later; scales and offsets go on after the last block that has them.
template <bool Halves>
__attribute__((always_inline)) static inline void enter(const Panel &p, int64_t b, const uint8_t *&ahead, const float *&d,
                                                        const float *&m, int64_t &until) {
  for (int64_t line = 0; line < p.ahead_step; line += 64) __builtin_prefetch(ahead + line, 0, 3);
  ahead += p.ahead_step;
  if (!Halves && b == until) {
    d += kRows;
    m += kRows;
    until += p.blocks_per_scale;
  }
}

// acc[c][row] of C columns of activations: x [block][C][32], s [block][which][C].
template <Codes K, bool Halves, bool Offset, int C>
void tile(const Panel &p, const int8_t *x, const float *s, float *out) {
  constexpr int64_t which = scales_per_block(Halves, is_based(K));
  using Sum = std::conditional_t<K == Codes::kU4 || is_based(K), Small, Wide>;
  alignas(64) float acc[C][kRows] = {};
  // Where both halves of a block have one scale of the weight's, that is multiplied in once (3 to 9 % at many rows; with
  // offsets there is no gain).
  constexpr bool once = !Halves && !Offset;
  alignas(64) float first[C][kRows];  // a block's first half
  const uint8_t *w = p.codes;
  const uint8_t *ahead = p.ahead;
  const float *d = p.scales, *m = p.offsets;
  int64_t until = p.blocks_per_scale;
  for (int64_t b = 0; b < p.blocks; b++) {
    enter<Halves>(p, b, ahead, d, m, until);
#pragma GCC unroll kUnroll
    for (int part = 0; part < 2; part++) {
      Sum sum[C];
#pragma GCC unroll kUnroll
      for (int c = 0; c < C; c++) {
        if constexpr (is_based(K)) start(sum[c], s + ((Halves ? 4 : 3) + part) * C + c);
        else clear(sum[c]);
      }
#pragma GCC unroll kUnroll
      for (int v = part * 4; v < part * 4 + 4; v++) {
        const auto q = fetch<K>(w, v, p.table);
#pragma GCC unroll kUnroll
        for (int c = 0; c < C; c++) add(sum[c], q, load_quad(x + c * kBlock + 4 * v));
      }
#pragma GCC unroll kUnroll
      for (int c = 0; c < C; c++) {
        vf f[kVectors];
        widen(sum[c], f);
        const vf scale = splat(s[part * C + c]);
#pragma GCC unroll kUnroll
        for (int r = 0; r < kVectors; r++) {
          if (once && !part) {
            store(&first[c][r * W], f[r] * scale);
            continue;
          }
          vf a = once ? fma(load(d + r * W), fma(f[r], scale, load(&first[c][r * W])), load(&acc[c][r * W]))
                      : fma(load(d + r * W) * scale, f[r], load(&acc[c][r * W]));
          if (Offset && (Halves || part)) a = fma(load(m + r * W), splat(s[(Halves ? 2 + part : 2) * C + c]), a);
          store(&acc[c][r * W], a);
        }
      }
      if constexpr (Halves) {
        d += kRows;
        m += kRows;
      }
    }
    w += unit_bytes(K);
    x += C * kBlock;
    s += C * which;
#if defined(__x86_64__)
    if constexpr (C > 2) asm volatile("" : : "r"(acc) : "memory");  // float sums wait in memory: integer ones need the registers
#endif
  }
  std::memcpy(out, acc, sizeof acc);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

// Rows 8 * half .. of slices v and v + 1 of a block as they were stored, in pairs of rows by 8 columns.
template <Codes K>
__attribute__((always_inline)) static inline Slice stored_pairs(const uint8_t *block, int v, int half, const int8_t *table) {
  if constexpr (K == Codes::kU4 || K == Codes::kTable4 || K == Codes::kTable6) {
    // Interleaved while two codes share a byte: half as many instructions.
    const uint8_t *at = block + (v & 3) * kSliceBytes;
    const Slice both = interleave(load_slice(at), load_slice(at + kSliceBytes), half);
    const Slice codes = v < 4 ? low_nibbles(both) : high_nibbles(both);
    if constexpr (K == Codes::kU4) return codes;
    else return look_up(codes, table);
  } else {
    return interleave(stored<K>(block, v, table), stored<K>(block, v + 1, table), half);
  }
}

// Adds what rows 4q .. 4q + 3 of a block at `w` make of it to acc [pair][row pair][2 x 2]. Codes of every kind fit int8,
// so that all are multiplied as signed ones.
template <Codes K, bool Halves, bool Offset, int C>
__attribute__((always_inline)) static inline void add_rows(const uint8_t *w, int q, const int8_t *table,
                                                           const Tokens<C> &t, const float *d, const float *m,
                                                           float *acc) {
  constexpr int pairs = Tokens<C>::kPairs;
  constexpr bool once = !Halves && !Offset;  // as in `tile`
  vi sum[2][2][pairs];                       // [half of the block][row pair][pair of tokens]
#pragma GCC unroll 2
  for (int part = 0; part < 2; part++)
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
#pragma GCC unroll kUnroll
      for (int c = 0; c < pairs; c++) sum[part][i][c] = is_based(K) ? t.start[part][c] : vi{};
#pragma GCC unroll 2
  for (int eight = 0; eight < 2; eight++)
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      const Slice rows = stored_pairs<K>(w, 4 * part + 2 * eight, q / 2, table);
#pragma GCC unroll kUnroll
      for (int c = 0; c < pairs; c++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
          sum[part][i][c] = (vi)vmmlaq_s32((int32x4_t)sum[part][i][c], rows.v[2 * (q & 1) + i], t.x[part][eight][c]);
    }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const vf low = by_rows(load(d + 4 * q), i), high = Halves ? by_rows(load(d + kRows + 4 * q), i) : low;
    const vf low_offset = Offset ? by_rows(load(m + 4 * q), i) : vf{};
    const vf high_offset = Offset && Halves ? by_rows(load(m + kRows + 4 * q), i) : vf{};
#pragma GCC unroll kUnroll
    for (int c = 0; c < pairs; c++) {
      float *at = acc + (c * kRowPairs + 2 * q + i) * W;
      const vf first = to_float(sum[0][i][c]), second = to_float(sum[1][i][c]);
      vf a = load(at);
      if constexpr (once) {
        a = fma(low, fma(second, t.scale[1][c], first * t.scale[0][c]), a);
      } else {
        a = fma(low * t.scale[0][c], first, a);
        if constexpr (Halves && Offset) a = fma(low_offset, t.sum[0][c], a);
        a = fma(high * t.scale[1][c], second, a);
        if constexpr (Offset) a = fma(Halves ? high_offset : low_offset, t.sum[Halves][c], a);
      }
      store(at, a);
    }
  }
}

// As `tile`, for two columns of activations and more.
template <Codes K, bool Halves, bool Offset, int C>
void tile_in_pairs(const Panel &p, const int8_t *x, const float *s, float *out) {
  alignas(64) float acc[Tokens<C>::kPairs * kRowPairs * W] = {};
  const uint8_t *w = p.codes, *ahead = p.ahead;
  const float *d = p.scales, *m = p.offsets;
  int64_t until = p.blocks_per_scale;
  for (int64_t b = 0; b < p.blocks; b++) {
    enter<Halves>(p, b, ahead, d, m, until);
    Tokens<C> tokens;
    load_tokens<Halves, Offset, is_based(K)>(tokens, x, s);
#pragma GCC unroll 4
    for (int q = 0; q < kRows / 4; q++) {
      // Tokens and float sums wait in memory: integer sums need the registers.
      if constexpr (C > 2) asm volatile("" : : "r"(&tokens), "r"(acc) : "memory");
      add_rows<K, Halves, Offset>(w, q, p.table, tokens, d, m, acc);
    }
    if constexpr (Halves) {
      d += 2 * kRows;
      m += 2 * kRows;
    }
    w += unit_bytes(K);
    x += C * kBlock;
    s += C * scales_per_block(Halves, is_based(K));
  }
  separate<C>(acc, out);
}

#endif

using Tile = void (*)(const Panel &, const int8_t *, const float *, float *);

template <Codes K, bool Halves, bool Offset>
Tile tile_of_width(int64_t width) {
  switch (width) {
    case 1: return tile<K, Halves, Offset, 1>;
#if defined(__ARM_FEATURE_MATMUL_INT8)
    case 2: return tile_in_pairs<K, Halves, Offset, 2>;
    case 3: return tile_in_pairs<K, Halves, Offset, 3>;
    case 4: return tile_in_pairs<K, Halves, Offset, 4>;
    case 5: return tile_in_pairs<K, Halves, Offset, 5>;
    case 6: return tile_in_pairs<K, Halves, Offset, 6>;
    case 7: return tile_in_pairs<K, Halves, Offset, 7>;
    default: return tile_in_pairs<K, Halves, Offset, 8>;
#else
    case 2: return tile<K, Halves, Offset, 2>;
    case 3: return tile<K, Halves, Offset, 3>;
#if defined(__AVX512F__)
    case 5: return tile<K, Halves, Offset, 5>;
    case 6: return tile<K, Halves, Offset, 6>;
    case 7: return tile<K, Halves, Offset, 7>;
    case 8: return tile<K, Halves, Offset, 8>;
#endif
    default: return tile<K, Halves, Offset, 4>;
#endif
  }
}

template <Codes K>
Tile tile_of(bool halves, bool offset, int64_t width) {
  if (halves) return offset ? tile_of_width<K, true, true>(width) : tile_of_width<K, true, false>(width);
  return offset ? tile_of_width<K, false, true>(width) : tile_of_width<K, false, false>(width);
}

Tile tile_of(Codes codes, bool halves, bool offset, int64_t width) {
  switch (codes) {
    case Codes::kU4: return tile_of<Codes::kU4>(halves, offset, width);
    case Codes::kTable4: return tile_of<Codes::kTable4>(halves, offset, width);
    case Codes::kTable6: return tile_of<Codes::kTable6>(halves, offset, width);
    case Codes::kU5: return tile_of<Codes::kU5>(halves, offset, width);
    case Codes::kU6: return tile_of<Codes::kU6>(halves, offset, width);
    case Codes::kBytes6: return tile_of<Codes::kBytes6>(halves, offset, width);
    default: return tile_of<Codes::kI8>(halves, offset, width);
  }
}

// Numbers of a level for one panel, as float32.
void widen_numbers(int32_t dtype, const char *data, int64_t count, float *out) {
  switch (dtype) {
    case HP_F32: std::memcpy(out, data, (std::size_t)count * 4); break;
    case HP_F16:
      for (int64_t k = 0; k < count; k += W) store(out + k, load_half((const uint16_t *)data + k));
      break;
    case HP_BF16:
      for (int64_t k = 0; k < count; k += W) store(out + k, load_bf16((const uint16_t *)data + k));
      break;
    case HP_I8:
      for (int64_t k = 0; k < count; k++) out[k] = (float)((const int8_t *)data)[k];
      break;
    default:
      for (int64_t k = 0; k < count; k++) out[k] = (float)((const uint8_t *)data)[k];
  }
}

// A panel's scales or offsets: [count][16].
void widen_level(const Level &fine, const Level &coarse, int64_t super_group, int64_t panel, float *out) {
  const int64_t numbers = fine.count * kRows;
  widen_numbers(fine.dtype, fine.data + panel * numbers * number_bytes(fine.dtype), numbers, out);
  if (!coarse.count) return;
  const int64_t each = kRows * number_bytes(coarse.dtype);
  for (int64_t g = 0; g < coarse.count; g++) {
    float top[kRows];
    widen_numbers(coarse.dtype, coarse.data + (panel * coarse.count + g) * each, kRows, top);
    const int64_t end = (g + 1) * super_group < fine.count ? (g + 1) * super_group : fine.count;
    for (int64_t k = g * super_group; k < end; k++)
      for (int r = 0; r < kRows; r += W) store(out + k * kRows + r, load(out + k * kRows + r) * load(top + r));
  }
}

void widen_scales(const hp_weight &w, int64_t panel, float *scales, float *offsets) {
  const int64_t numbers = w.scales.count * kRows;
  widen_level(w.scales, w.super_scales, w.super_group, panel, scales);
  if (w.unit != 1.f)
    for (int64_t k = 0; k < numbers; k += W) store(scales + k, load(scales + k) * splat(w.unit));
  if (!w.offset) return;
  if (w.offsets.count) return widen_level(w.offsets, w.super_offsets, w.super_group, panel, offsets);
  for (int64_t k = 0; k < numbers; k += W) store(offsets + k, load(scales + k) * splat(-w.zero));
}

// Codes of a panel as bytes.
template <Codes K>
void unpack(const hp_weight &w, const uint8_t *codes, uint8_t *out) {
  for (int64_t b = 0; b < w.units; b++, codes += unit_bytes(K)) {
#pragma GCC unroll kUnroll
    for (int v = 0; v < 8; v++, out += kSliceBytes) store_slice(out, stored<K>(codes, v, w.table));
  }
}

void unpack(const hp_weight &w, const uint8_t *codes, uint8_t *out) {
  switch (w.codes) {
    case Codes::kU5: return unpack<Codes::kU5>(w, codes, out);
    case Codes::kU6: return unpack<Codes::kU6>(w, codes, out);
    default: return unpack<Codes::kTable4>(w, codes, out);
  }
}

// From this many rows on, codes that are not multiplied as they lie are unpacked once per panel.
constexpr int64_t kUnpackRows = 3 * kTile;
constexpr int64_t kUnpackMost = 384 << 10;

// While the first tiles of a panel are computed, the panel at `next` is fetched; a single tile of a large panel fetches a
// little ahead of itself.
void look_ahead(Panel &view, const uint8_t *packed, const uint8_t *next, int64_t panel_bytes, int64_t tile, int64_t tiles) {
  constexpr int64_t kNear = 3072, kSmall = 16384, kTiles = 4;
  const int64_t block_bytes = panel_bytes / view.blocks;
  const int64_t fetching = tiles < 2 ? 1 : tiles < kTiles ? 2 : kTiles;
  const bool near = tiles < 2 && panel_bytes > kSmall;
  view.ahead_step = tile < fetching && (near || next) ? block_bytes / fetching : 0;
  view.ahead = near ? packed + kNear : next + tile * view.ahead_step * view.blocks;
}

// The next panel's numbers of a level.
void fetch_numbers(const Level &level, int64_t panel) {
  const int64_t bytes = level.count * kRows * number_bytes(level.dtype);
  const char *at = level.data + panel * bytes;
  for (int64_t k = 0; k < bytes; k += 64) __builtin_prefetch(at + k, 0, 3);
}

void fetch_scales(const hp_weight &w, int64_t panel) {
  fetch_numbers(w.scales, panel);
  if (w.offsets.count) fetch_numbers(w.offsets, panel);
}

bool unpacks(const hp_weight &w) {
  return (w.codes == Codes::kTable4 || is_based(w.codes)) && w.units * 8 * kSliceBytes <= kUnpackMost;
}

// Rows per pass over the panels, so that their codes stay in the second-level cache.
int64_t rows_per_pass(const hp_weight &w) {
  const int64_t fit = (int64_t{256} << 10) / (w.units * 40) / kTile * kTile;
  return fit < 16 ? 16 : fit > 64 ? 64 : fit;
}

}  // namespace

int64_t multiply_bytes(const hp_weight &w) {
  if (is_float(w.codes)) return 0;
  return w.scales.count * kRows * 4 * (w.offset ? 2 : 1) + 64 + (unpacks(w) ? w.units * 8 * kSliceBytes : 0);
}

void multiply_integer(const hp_weight &w, int64_t begin, int64_t end, int64_t following, const Rows &rows,
                      const Result &result, char *scratch) {
  float *scales = (float *)scratch, *offsets = w.offset ? scales + w.scales.count * kRows : scales;
  uint8_t *unpacked = (uint8_t *)(offsets + w.scales.count * kRows);
  const int64_t panel_bytes = w.units * unit_bytes(w.codes), pass = rows_per_pass(w);
  for (int64_t from = 0; from < rows.count; from += pass) {
    const int64_t to = from + pass < rows.count ? from + pass : rows.count;
    const bool by_bytes = to - from >= kUnpackRows && unpacks(w);
    const Codes codes = !by_bytes ? w.codes : is_based(w.codes) ? Codes::kBytes6 : Codes::kI8;
    for (int64_t panel = begin; panel < end; panel++) {
      widen_scales(w, panel, scales, offsets);
      const uint8_t *packed = (const uint8_t *)w.code_data + panel * panel_bytes;
      const int64_t next = panel + 1 < end ? panel + 1 : to < rows.count ? begin : following;
      const uint8_t *next_packed = next < 0 ? nullptr : (const uint8_t *)w.code_data + next * panel_bytes;
      if (next >= 0) fetch_scales(w, next);
      Panel view{packed, scales, offsets, w.units, w.blocks_per_scale, w.table, nullptr, 0};
      if (by_bytes) {
        unpack(w, view.codes, unpacked);
        view.codes = unpacked;
      }
      for (int64_t row = from; row < to; row += kTile) {
        const int64_t width = to - row < kTile ? to - row : kTile;
        look_ahead(view, packed, next_packed, panel_bytes, (row - from) / kTile, (to - from + kTile - 1) / kTile);
        alignas(64) float sums[kTile * kRows];
        tile_of(codes, w.halves, w.offset, width)(view, rows.codes + row * row_codes(w), rows.scales + row * row_scales(w), sums);
        emit(w, panel, row, (int)width, sums, result);
      }
    }
  }
}

HP_END
