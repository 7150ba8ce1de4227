// hp_weight_new: from the neutral form of a matrix to the layout of weight.h.
#include <new>

#include "gemm.h"
#include "gemm_source.h"

HP_BEGIN

namespace {

// What all threads find out together before anything is packed.
struct Shared {
  std::atomic<int> outside;      // int8 codes lie outside ranges: bits of `Range`
  std::atomic<int> own_offsets;  // an offset that is not -zero * scale
  hp_weight *weight;
};

// Codes of an int8 matrix through its codebook, if it has one.
static inline int8_t mapped(const int8_t *map, int8_t stored) { return map ? map[stored + 128] : stored; }

// Ranges that int8 codes may all lie in, the best first.
enum Range : int { kAround0 = 1, kAbove0 = 2, kSixBits = 4 };  // [-16, 15], [0, 31], [-32, 31]

void find_ranges(const hp_matrix &m, const int8_t *map, const Worker &worker, Shared &shared) {
  int64_t begin, end;
  share(m.rows, 1, worker, begin, end);
  for (int64_t row = begin; row < end && !(shared.outside.load(std::memory_order_relaxed) & kSixBits); row++) {
    const int8_t *codes = (const int8_t *)m.values + row * m.columns;
    uint8_t around = 0, above = 0, six = 0;  // a bit above the range's
    for (int64_t k = 0; k < m.columns; k++) {
      const int8_t code = mapped(map, codes[k]);
      around |= (uint8_t)(code + 16);
      above |= (uint8_t)code;
      six |= (uint8_t)(code + 32);
    }
    shared.outside.fetch_or((around > 31 ? kAround0 : 0) | (above > 31 ? kAbove0 : 0) | (six > 63 ? kSixBits : 0));
  }
}

void find_own_offsets(const Source &source, float zero, const Worker &worker, Shared &shared) {
  int64_t begin, end;
  share(source.m.rows, 1, worker, begin, end);
  for (int64_t row = begin; row < end && !shared.own_offsets.load(std::memory_order_relaxed); row++)
    for (int64_t g = 0; g < source.groups; g++)
      if (source.scale(row, g) * -zero != source.offset(row, g)) {
        shared.own_offsets.store(1);
        break;
      }
}

// What -offset / scale is, if it is the same everywhere.
float candidate_zero(const Source &source) {
  for (int64_t row = 0; row < source.m.rows; row++)
    for (int64_t g = 0; g < source.groups; g++)
      if (source.scale(row, g) != 0.f) return -source.offset(row, g) / source.scale(row, g);
  return 0.f;
}

// A codebook as int8 codes worth `unit` each: exact where its entries are integers up to 127 in size.
float round_codebook(const float *book, int64_t entries, int8_t *out) {
  float most = 0.f;
  bool whole = true;
  for (int64_t k = 0; k < entries; k++) {
    most = std::fmax(most, std::fabs(book[k]));
    whole = whole && book[k] == std::nearbyintf(book[k]);
  }
  const float unit = (whole && most <= 127.f) || most == 0.f ? 1.f : most / 127.f;
  for (int64_t k = 0; k < entries; k++) out[k] = (int8_t)std::nearbyintf(book[k] / unit);
  return unit;
}

static inline uint32_t four(const void *p) {
  uint32_t v;
  std::memcpy(&v, p, 4);
  return v;
}
static inline void put(char *p, uint32_t v) { std::memcpy(p, &v, 4); }

// Eight nibbles to eight bytes.
static inline uint64_t spread(uint32_t nibbles) {
  uint64_t x = nibbles;
  x = (x | x << 16) & 0x0000ffff0000ffffULL;
  x = (x | x << 8) & 0x00ff00ff00ff00ffULL;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0fULL;
}

// One row of one block. `out` is the row's first byte of the block's first slice.
void pack4(const uint8_t *packed, char *out) {
  for (int half = 0; half < 2; half++) {
    const uint64_t both = spread(four(packed + 4 * half)) | spread(four(packed + 8 + 4 * half)) << 4;
    put(out + 2 * half * kSliceBytes, (uint32_t)both);
    put(out + (2 * half + 1) * kSliceBytes, (uint32_t)(both >> 32));
  }
}

void pack8(const int8_t *codes, char *out) {
  for (int v = 0; v < 8; v++) put(out + v * kSliceBytes, four(codes + 4 * v));
}

void pack5(const int8_t *codes, int32_t base, char *out) {
  uint32_t code[8], high = 0;
  for (int v = 0; v < 8; v++) {
    code[v] = (four(codes + 4 * v) & 0x1f1f1f1fU) ^ (base ? 0x10101010U : 0);  // + 16
    high |= (code[v] >> 4 & 0x01010101U) << v;
  }
  for (int v = 0; v < 4; v++) put(out + v * kSliceBytes, (code[v] & 0x0f0f0f0fU) | (code[v + 4] & 0x0f0f0f0fU) << 4);
  put(out + 4 * kSliceBytes, high);
}

void pack6(const int8_t *codes, char *out) {
  uint32_t code[8], high[2] = {0, 0};
  for (int v = 0; v < 8; v++) {
    code[v] = (four(codes + 4 * v) & 0x3f3f3f3fU) ^ 0x20202020U;  // + 32
    high[v / 4] |= (code[v] >> 4 & 0x03030303U) << 2 * (v & 3);
  }
  for (int v = 0; v < 4; v++) put(out + v * kSliceBytes, (code[v] & 0x0f0f0f0fU) | (code[v + 4] & 0x0f0f0f0fU) << 4);
  for (int part = 0; part < 2; part++) put(out + (4 + part) * kSliceBytes, high[part]);
}

void pack_block(const hp_weight &w, const hp_matrix &m, const int8_t *map, int64_t row, int64_t block, char *out) {
  const int64_t left = m.columns - block * kBlock, width = left < kBlock ? left : kBlock;
  if (m.packing == 2) {
    const uint8_t *packed = (const uint8_t *)m.values + row * ((m.columns + 1) / 2) + block * (kBlock / 2);
    uint8_t copy[kBlock / 2] = {};
    if (width < kBlock) {
      std::memcpy(copy, packed, (std::size_t)(width + 1) / 2);
      packed = copy;
    }
    return pack4(packed, out);
  }
  const int8_t *codes = (const int8_t *)m.values + row * m.columns + block * kBlock;
  int8_t copy[kBlock] = {};
  if (width < kBlock || map) {
    for (int64_t k = 0; k < width; k++) copy[k] = mapped(map, codes[k]);
    codes = copy;
  }
  if (w.codes == Codes::kU5) pack5(codes, w.base, out);
  else if (w.codes == Codes::kU6) pack6(codes, out);
  else pack8(codes, out);
}

template <class Number>
void copy_numbers(const void *source, int64_t per_row, int64_t first, int64_t rows, int64_t count, char *out) {
  const int64_t have = per_row < count ? per_row : count;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t g = 0; g < have; g++) ((Number *)out)[g * kRows + r] = ((const Number *)source)[(first + r) * per_row + g];
}

void pack_level(const Level &level, const void *source, int64_t per_row, int64_t panel, int64_t rows) {
  if (!level.count) return;
  const int64_t size = number_bytes(level.dtype), first = panel * kRows;
  char *out = level.data + first * level.count * size;
  if (rows < kRows || per_row < level.count) std::memset(out, 0, (std::size_t)(level.count * kRows * size));
  if (size == 1) copy_numbers<uint8_t>(source, per_row, first, rows, level.count, out);
  else if (size == 2) copy_numbers<uint16_t>(source, per_row, first, rows, level.count, out);
  else copy_numbers<uint32_t>(source, per_row, first, rows, level.count, out);
}

void pack_integers(const hp_weight &w, const Source &source, const int8_t *map, int64_t panel) {
  constexpr int64_t kChunk = 16;  // blocks whose panel part stays in the first-level cache
  const hp_matrix &m = source.m;
  const int64_t first = panel * kRows, rows = m.rows - first < kRows ? m.rows - first : kRows;
  const int64_t bytes = unit_bytes(w.codes);
  char *out = w.code_data + panel * w.units * bytes;
  if (rows < kRows) std::memset(out, 0, (std::size_t)(w.units * bytes));
  for (int64_t from = 0; from < w.units; from += kChunk)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t b = from; b < from + kChunk && b < w.units; b++) pack_block(w, m, map, first + r, b, out + b * bytes + 4 * r);
  pack_level(w.scales, m.scales, source.groups, panel, rows);
  pack_level(w.offsets, m.offsets, source.groups, panel, rows);
  pack_level(w.super_scales, m.super_scales, source.supers, panel, rows);
  pack_level(w.super_offsets, m.super_offsets, source.supers, panel, rows);
}

void pack_floats(const hp_weight &w, const Source &source, int64_t panel, float *row_copy) {
  const hp_matrix &m = source.m;
  const int64_t first = panel * kRows, rows = m.rows - first < kRows ? m.rows - first : kRows;
  const int64_t bytes = unit_bytes(w.codes);
  char *out = w.code_data + panel * w.units * bytes;
  if (rows < kRows) std::memset(out, 0, (std::size_t)(w.units * bytes));
  for (int64_t r = 0; r < rows; r++) {
    if (w.codes == Codes::kF32) {
      const float *row = m.packing ? row_copy : (const float *)m.values + (first + r) * m.columns;
      if (m.packing) source.dequantize(first + r, row_copy);
      for (int64_t k = 0; k < m.columns; k++) std::memcpy(out + k * bytes + 4 * r, row + k, 4);
    } else {
      const uint16_t *row = (const uint16_t *)m.values + (first + r) * m.columns;
      for (int64_t k = 0; k < m.columns; k++) std::memcpy(out + k * bytes + 2 * r, row + k, 2);
    }
  }
}

// The narrowest codes for a matrix; `table` is its codebook of 16, or NULL.
void choose_codes(const hp_matrix &m, const Shared &shared, const int8_t *table, hp_weight &w) {
  const int outside = shared.outside;
  if (table) {
    bool small = true;
    for (int k = 0; k < 16; k++) small = small && table[k] >= -32 && table[k] <= 32;
    w.codes = small ? Codes::kTable6 : Codes::kTable4;
    w.base = small ? -32 : 0;
    for (int k = 0; k < 16; k++) w.table[k] = (int8_t)(table[k] - w.base);
  } else if (m.packing == 2) {
    w.codes = Codes::kU4;
  } else if ((outside & (kAround0 | kAbove0)) != (kAround0 | kAbove0)) {
    w.codes = Codes::kU5;
    w.base = outside & kAbove0 ? -16 : 0;
  } else {
    w.codes = outside & kSixBits ? Codes::kI8 : Codes::kU6;
    w.base = outside & kSixBits ? 0 : -32;
  }
}

// Sizes and kinds of the integer layout; allocation and packing follow.
void describe_integers(const Source &source, const Shared &shared, const int8_t *table, float zero, hp_weight &w) {
  const hp_matrix &m = source.m;
  w.units = (m.columns + kBlock - 1) / kBlock;
  choose_codes(m, shared, table, w);
  w.halves = source.groups > 1 && m.group == kBlock / 2;
  w.blocks_per_scale = source.groups == 1 ? w.units : m.group / kBlock;
  if (w.halves) w.blocks_per_scale = 1;
  const int64_t count = w.halves ? 2 * w.units : source.groups;
  w.super_group = source.supers ? m.super_group : 0;
  w.scales = {nullptr, m.scales_dtype, count};
  w.super_scales = {nullptr, m.super_scales_dtype, m.super_scales ? source.supers : 0};
  w.offset = m.offsets != nullptr;
  if (m.offsets && !shared.own_offsets) {
    w.zero = zero;
    w.offset = zero != 0.f;
  } else if (m.offsets) {
    w.offsets = {nullptr, m.offsets_dtype, count};
    w.super_offsets = {nullptr, m.super_offsets_dtype, m.super_offsets ? source.supers : 0};
  }
}

hp_weight *describe(const Source &source, bool integers, const Shared &shared, const int8_t *table, float zero) {
  hp_weight *w = new (std::nothrow) hp_weight;
  if (!w) return nullptr;
  const hp_matrix &m = source.m;
  w->rows = m.rows;
  w->columns = m.columns;
  w->panels = (m.rows + kRows - 1) / kRows;
  if (integers) {
    describe_integers(source, shared, table, zero, *w);
  } else {
    w->units = m.columns;
    w->codes = m.packing || m.values_dtype == HP_F32 ? Codes::kF32 : m.values_dtype == HP_F16 ? Codes::kF16 : Codes::kBF16;
  }
  return w;
}

}  // namespace

// Called by all threads of a pool; every one returns the weight.
hp_weight *weight_new(const Worker *worker, const hp_matrix &matrix, bool exact) {
  const Source source(matrix);
  if (!source.valid()) return nullptr;
  const bool integers = matrix.packing && !exact && source.fits_blocks();
  int8_t codes_of[256];
  const int64_t entries = matrix.packing == 2 ? 16 : 256;
  const float unit = integers && matrix.codebook ? round_codebook(matrix.codebook, entries, codes_of) : 1.f;
  const int8_t *map = integers && matrix.codebook && matrix.packing == 1 ? codes_of : nullptr;
  const int8_t *table = integers && matrix.codebook && matrix.packing == 2 ? codes_of : nullptr;
  const float zero = integers && matrix.offsets ? candidate_zero(source) : 0.f;

  Shared &shared = *(Shared *)worker->shared_scratch(sizeof(Shared));
  if (worker->thread == 0) new (&shared) Shared{{0}, {0}, nullptr};
  worker->barrier();
  if (integers && matrix.packing == 1) find_ranges(matrix, map, *worker, shared);
  if (integers && matrix.offsets) find_own_offsets(source, zero, *worker, shared);
  worker->barrier();
  if (worker->thread == 0) {
    hp_weight *w = describe(source, integers, shared, table, zero);
    if (w) {
      w->unit = unit;
      if (!allocate(*w, worker->weight_memory())) {
        delete w;
        w = nullptr;
      } else {
        name_layout(*w);
      }
    }
    shared.weight = w;
  }
  worker->barrier();
  hp_weight *w = shared.weight;
  if (!w) return nullptr;
  float *row_copy = (float *)worker->scratch((std::size_t)matrix.columns * 4);
  int64_t begin, end;
  share(w->panels, 1, *worker, begin, end);
  for (int64_t panel = begin; panel < end; panel++)
    integers ? pack_integers(*w, source, map, panel) : pack_floats(*w, source, panel, row_copy);
  return w;
}

HP_END
