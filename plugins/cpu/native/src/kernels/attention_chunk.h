// Attention of some rows (query x head) over one chunk of keys, and how chunks join.
//
// Keys are cut at fixed positions, kChunk apiece, whatever step or thread they are read in:
//
//     position   0        64       128      192
//     chunks     |...0....|...1....|...2....|..      a row at position 150 takes 0, 1 and the first 23 keys of 2
//
// Per row and chunk: scores, their maximum m, p = exp(score - m), l = sum of p, o = sum of p * value. Chunks join in
// ascending order, from (top, total, mixed) = (-infinity, 0, 0), or from (sink, 1, 0):
//
//     top' = max(top, m)    total' = total * exp(top - top') + l * exp(m - top')    mixed' likewise with o
//
// A row's arithmetic follows from its position and its keys alone: not from rows beside it, nor from whether one
// thread walks all chunks or many threads take a few each and the results are joined afterwards.
#pragma once

#include "../activation.h"
#include "attention_tiles.h"

HP_BEGIN

constexpr int kChunk = 64;

// How scores are made, apart from the dot product. Queries are scaled before.
struct ScoreRule {
  int64_t window;       // keys a query sees, itself included; 0: all
  float softcap;        // 0: none
  const float *slopes;  // [heads] of ALiBi, or NULL
  const float *sinks;   // [heads], or NULL
};

// Rows that share their keys: queries x heads, query by query.
struct Rows {
  int64_t count, heads;
  int64_t position;    // of the first query
  int64_t first_head;  // among all query heads
  const float *q;      // [count, width], scaled, padded, q_stride from one to the next
  int64_t q_stride, width, value_width;

  int64_t position_of(int64_t row) const { return position + row / heads; }
  int64_t head_of(int64_t row) const { return first_head + row % heads; }
};

// One chunk's keys. Those outside [low, high) are never read: their pointers repeat a neighbour's.
template <class Type>
struct Keys {
  const Type *key[kChunk], *value[kChunk];
  float key_scale[kChunk], value_scale[kChunk];  // of int8
  bool scaled;
  int64_t start;  // position of key 0
  int low, high;
  const Keys *next;  // the chunk to be read after this one, or NULL
};

// What a chunk gives a row; total < 0 where the row sees none of its keys.
struct Part {
  float top, total;
};

static constexpr int32_t kLane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// scores -> p in place, for the keys [low, high) of a row. query: the row's position, less the chunk's.
static inline Part soften(float *scores, int low, int high, const ScoreRule &rule, float slope, int64_t query,
                          const float *key_scale, const float *value_scale) {
  vi lane;
  std::memcpy(&lane, kLane, sizeof lane);
  const vf nothing = splat(-__builtin_inff()), cap = splat(rule.softcap);
  const int first = low / W * W;
  vf most = nothing;
  for (int k = first; k < high; k += W) {
    vf s = load(scores + k);
    const vi at = lane + splat_int(k);
    if (key_scale) s = s * load(key_scale + k);
    if (rule.softcap > 0) s = cap * vtanh(s / cap);
    if (slope != 0) s = s + splat(slope) * to_float(at - splat_int((int32_t)query));
    if (k < low || k + W > high) s = select((at >= splat_int(low)) & (at < splat_int(high)), s, nothing);
    store(scores + k, s);
    most = vmax(s, most);
  }
  Part part{max_lane(most), 0};
  const vf top = splat(part.top);
  vf total{};
  for (int k = first; k < high; k += W) {
    vf p = vexp(load(scores + k) - top);
    total = total + p;
    if (value_scale) p = p * load(value_scale + k);
    store(scores + k, p);
  }
  part.total = sum(total);
  return part;
}

// The same for R rows with nothing but a dot product in their scores. Rows go side by side, to hide latencies.
template <int R>
static inline void soften_plain(float *scores, const int *low, const int *high, Part *parts) {
  vi lane;
  std::memcpy(&lane, kLane, sizeof lane);
  const vf nothing = splat(-__builtin_inff());
  int from = kChunk, to = 0;
  bool whole = true;
  for (int r = 0; r < R; r++) {
    from = low[r] < from ? low[r] : from;
    to = high[r] > to ? high[r] : to;
  }
  from = from / W * W;
  for (int r = 0; r < R; r++) whole = whole && low[r] <= from && high[r] == to;
  if (!whole || to % W)
    for (int k = from; k < to; k += W)
      HP_UNROLL for (int r = 0; r < R; r++) {
        const vi at = lane + splat_int(k), seen = (at >= splat_int(low[r])) & (at < splat_int(high[r]));
        store(scores + r * kChunk + k, select(seen, load(scores + r * kChunk + k), nothing));
      }
  vf most[R], total[R];
  HP_UNROLL for (int r = 0; r < R; r++) most[r] = nothing, total[r] = vf{};
  for (int k = from; k < to; k += W)
    HP_UNROLL for (int r = 0; r < R; r++) most[r] = vmax(load(scores + r * kChunk + k), most[r]);
  HP_UNROLL for (int r = 0; r < R; r++) most[r] = splat(parts[r].top = max_lane(most[r]));
  for (int k = from; k < to; k += W)
    HP_UNROLL for (int r = 0; r < R; r++) {
      const vf p = vexp(load(scores + r * kChunk + k) - most[r]);
      total[r] = total[r] + p;
      store(scores + r * kChunk + k, p);
    }
  HP_UNROLL for (int r = 0; r < R; r++) parts[r].total = low[r] < high[r] ? sum(total[r]) : -1;
}

// mixed = sum of p * value for the keys each row sees; rows see different keys where the chunk crosses their position.
template <class Number, int R>
static inline void mix_seen(const float *p, const Keys<typename Number::type> &keys, const int *low, const int *high,
                            int64_t width, float *mixed) {
  int from = 0, to = kChunk;
  for (int r = 0; r < R; r++) {
    from = low[r] > from ? low[r] : from;
    to = high[r] < to ? high[r] : to;
  }
  std::memset(mixed, 0, sizeof(float) * (std::size_t)(R * width));
  if (from >= to) {
    for (int r = 0; r < R; r++)
      mix<Number, 1>(p + r * kChunk, kChunk, keys.value, low[r], high[r], width, mixed + r * width, width);
    return;
  }
  for (int r = 0; r < R; r++)
    if (low[r] < from) mix<Number, 1>(p + r * kChunk, kChunk, keys.value, low[r], from, width, mixed + r * width, width);
  mix<Number, R>(p, kChunk, keys.value, from, to, width, mixed, width);
  for (int r = 0; r < R; r++)
    if (to < high[r]) mix<Number, 1>(p + r * kChunk, kChunk, keys.value, to, high[r], width, mixed + r * width, width);
}

// Pages lie apart: the processor does not foresee where the next keys are.
template <class Type>
static inline void fetch(const Type *p, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / (int64_t)sizeof(Type)) __builtin_prefetch(p + i, 0, 3);
}

// R rows from `row` on over one chunk: parts[R], mixed [R, value_width]. scores: [R, kChunk] to work in.
template <class Number, int R>
static inline void attend_tile(const Rows &rows, int64_t row, const ScoreRule &rule,
                               const Keys<typename Number::type> &keys, float *scores, Part *parts, float *mixed) {
  int low[R], high[R], first = kChunk, last = 0;
  for (int r = 0; r < R; r++) {
    const int64_t at = rows.position_of(row + r) - keys.start;
    low[r] = keys.low;
    if (rule.window > 0 && at - rule.window + 1 > low[r])
      low[r] = at - rule.window + 1 < kChunk ? (int)(at - rule.window + 1) : kChunk;
    high[r] = at + 1 < keys.high ? (int)(at + 1) : keys.high;
    if (low[r] >= high[r]) {
      low[r] = high[r] = 0;
      continue;
    }
    first = low[r] < first ? low[r] : first;
    last = high[r] > last ? high[r] : last;
  }
  constexpr int N = R == 1 ? 8 : 4;
  const Keys<typename Number::type> *next = row == 0 ? keys.next : nullptr;
  for (int k = first / N * N; k < last; k += N) {
    if (next)
      for (int i = 0; i < N; i++) {
        fetch(next->key[k + i], rows.width);
        fetch(next->value[k + i], rows.value_width);
      }
    dots<Number, R, N>(rows.q + row * rows.q_stride, rows.q_stride, keys.key + k, rows.width, scores + k, kChunk);
  }
  const bool plain = rule.softcap <= 0 && !rule.slopes && !keys.scaled;
  if (plain) soften_plain<R>(scores, low, high, parts);
  for (int r = 0; r < R && !plain; r++) {
    if (low[r] == high[r]) {
      parts[r] = Part{0, -1};
      continue;
    }
    const float slope = rule.slopes ? rule.slopes[rows.head_of(row + r)] : 0.f;
    parts[r] = soften(scores + r * kChunk, low[r], high[r], rule, slope, rows.position_of(row + r) - keys.start,
                      keys.scaled ? keys.key_scale : nullptr, keys.scaled ? keys.value_scale : nullptr);
  }
  mix_seen<Number, R>(scores, keys, low, high, rows.value_width, mixed);
}

// Join a chunk's parts to what R rows have so far; both [R, width].
template <int R>
static inline void join(Part *sofar, float *mixed, const Part *parts, const float *more, int64_t width) {
  float gaps[2 * R + W] = {}, tops[R];
  for (int r = 0; r < R; r++) {
    tops[r] = parts[r].total >= 0 && !(parts[r].top <= sofar[r].top) ? parts[r].top : sofar[r].top;
    gaps[2 * r] = sofar[r].top - tops[r];
    gaps[2 * r + 1] = parts[r].top - tops[r];
  }
  for (int r = 0; r < 2 * R; r += W) store(gaps + r, vexp(load(gaps + r)));
  for (int r = 0; r < R; r++) {
    if (parts[r].total < 0) continue;
    const float keep = gaps[2 * r], add = gaps[2 * r + 1];
    sofar[r] = Part{tops[r], sofar[r].total * keep + parts[r].total * add};
    float *to = mixed + r * width;
    const float *from = more + r * width;
    for (int64_t i = 0; i < width; i += W) store(to + i, fma(load(to + i), splat(keep), load(from + i) * splat(add)));
  }
}

// A row's state before the first chunk.
static inline Part nothing_yet(const ScoreRule &rule, int64_t head) {
  return rule.sinks ? Part{rule.sinks[head], 1} : Part{-__builtin_inff(), 0};
}

// A row's result: mixed / total. Adding zero makes -0 into 0, which masked keys of either sign leave behind.
static inline void finish(const Part &sofar, float *mixed, int64_t width) {
  const vf by = splat(1.f / sofar.total);
  for (int64_t i = 0; i < width; i += W) store(mixed + i, load(mixed + i) * by + vf{});
}

// Where the rows of an item keep their results: joined as they come, or a part per chunk to be joined later.
struct Joined {
  Part *sofar;   // [rows]
  float *mixed;  // [rows, value_width]

  template <int R>
  void take(int64_t row, const Part *parts, const float *more, int64_t width) const {
    join<R>(sofar + row, mixed + row * width, parts, more, width);
  }
};
struct Apart {
  float *at;       // of the item's first row and this chunk: top, total, mixed[value_width]
  int64_t stride;  // from a row to the next

  template <int R>
  void take(int64_t row, const Part *parts, const float *more, int64_t width) const {
    for (int r = 0; r < R; r++) {
      float *to = at + (row + r) * stride;
      to[0] = parts[r].top;
      to[1] = parts[r].total;
      std::memcpy(to + 2, more + r * width, sizeof(float) * (std::size_t)width);
    }
  }
};

// All rows over one chunk. scores: [kTileRows, kChunk + value_width] to work in.
template <class Number, class To>
static inline void attend_chunk(const Rows &rows, const ScoreRule &rule, const Keys<typename Number::type> &keys,
                                float *scores, const To &to) {
  float *mixed = scores + kTileRows * kChunk;
  for_tiles(rows.count, [&](auto tile, int64_t row) {
    constexpr int R = decltype(tile)::value;
    Part parts[R];
    attend_tile<Number, R>(rows, row, rule, keys, scores, parts, mixed);
    to.template take<R>(row, parts, mixed, rows.value_width);
  });
}

HP_END
