// Reading and writing the paged pools [pages, page_tokens, heads, width].
#pragma once

#include "attention_plan.h"

HP_BEGIN

// One pool.
template <class Number>
struct Pool {
  using Type = typename Number::type;
  Type *numbers;
  float *scales;  // [slots, heads] of int8, else NULL
  int64_t heads, width;

  Type *row(int64_t slot, int64_t head) const { return numbers + (slot * heads + head) * width; }
  float *scale(int64_t slot, int64_t head) const { return scales ? scales + slot * heads + head : nullptr; }
};

// body(k, slot) for the keys low <= k < high of the chunk that starts at position `start`.
template <class Body>
static inline void for_slots(const hp_batch &batch, const hp_group &group, int64_t request, int64_t start, int low,
                             int high, Body body) {
  const int32_t *table = group.page_table + request * group.table_stride;
  const int64_t size = batch.page_tokens;
  int64_t page = (start + low) / size, inside = (start + low) % size;
  for (int k = low; k < high; page++, inside = 0) {
    const int64_t first = table[page] * size + inside;
    const int64_t run = size - inside < high - k ? size - inside : high - k;
    for (int64_t i = 0; i < run; i++, k++) body(k, first + i);
  }
}

// Repeat the pointers at the ends of [low, high), so that all kChunk may be followed.
template <class Type>
static inline void repeat_ends(const Type **at, int low, int high) {
  for (int k = 0; k < low; k++) at[k] = at[low];
  for (int k = high; k < kChunk; k++) at[k] = at[high - 1];
}

// Chunk bounds for the rows of a unit: no row sees keys outside.
static inline void bound(const Plan &plan, const Unit &unit, int64_t start, int &low, int &high) {
  const int64_t first = plan.window > 0 ? unit.position - plan.window + 1 - start : -start;
  const int64_t last = unit.position + unit.queries - start;
  low = first > 0 ? (int)first : 0;
  high = last < kChunk ? (int)last : kChunk;
}

// Store a row of the step. int8: one scale for the row, its absolute maximum / 127.
template <class Number>
static inline void store_row(const float *x, int64_t n, typename Number::type *out, float *) {
  int64_t i = 0;
  for (; i + W <= n; i += W) Number::put(out + i, load(x + i));
  for (; i < n; i++) out[i] = Number::put_one(x[i]);
}
template <>
inline void store_row<Int8>(const float *x, int64_t n, int8_t *out, float *scale) {
  float most = 0;
  for (int64_t i = 0; i < n; i++) most = std::fabs(x[i]) <= most ? most : std::fabs(x[i]);  // NaN stays
  *scale = most / 127.f;
  const float by = most > 0 ? 127.f / most : 0.f;
  for (int64_t i = 0; i < n; i++) {
    const float code = std::nearbyintf(x[i] * by);
    out[i] = std::fabs(code) <= 127.f ? (int8_t)code : (int8_t)0;
  }
}

HP_END
