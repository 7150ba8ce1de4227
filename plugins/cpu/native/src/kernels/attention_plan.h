// How the attention of a ragged batch is cut into items of work.
//
//     request -> blocks of queries -> blocks of heads that share keys -> pieces of consecutive chunks of keys
//
// A block's chunks stay together (one piece) while there is work for every thread; else they are cut into pieces, whose
// parts are kept per chunk and joined in order afterwards. Every thread makes the same plan from the batch.
#pragma once

#include "attention_chunk.h"

HP_BEGIN

constexpr int64_t kBlockRows = 48;  // rows of an item: enough to pay for widening the keys

struct Heads {
  int64_t total;   // query heads
  int64_t shared;  // of them one kv head
  bool by_query;   // blocks take one query's heads before the next query (else one head's queries)
};

// One block of queries, with all heads.
struct Unit {
  int64_t request, token, position;  // of the first query
  int64_t queries;
  int64_t heads, head_blocks;     // heads of one item; items with the same chunks
  int64_t first_chunk, chunks;    // chunks that the queries see
  int64_t pieces, piece;          // pieces, and chunks in each
  int64_t first_item, items;      // numbers of its items among all
  int64_t parts;                  // floats before its parts, where pieces > 1
  int64_t row_floats;             // of its parts
};

struct Plan {
  const hp_batch *batch;
  Heads heads;
  int64_t window;
  int64_t part_floats;   // kept per row and chunk of a cut unit: top, total, mixed
  int64_t query_floats;  // kept per row of a cut unit behind its parts: a query that is dear to make
  int64_t fair = 0;      // cost of an item; 0: never cut
  int64_t items = 0;     // of all units
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// body(const Unit &) for every unit, in one order: requests ascending, in each the last queries (the longest) first.
template <class Body>
static inline void for_units(const Plan &plan, Body body) {
  const hp_batch &batch = *plan.batch;
  int64_t item = 0, parts = 0;
  for (int64_t r = 0; r < batch.num_requests; r++) {
    const int64_t start = batch.query_start[r], count = batch.query_start[r + 1] - start;
    if (count <= 0) continue;
    const int64_t first_position = batch.seq_lens[r] - count;
    Unit unit{};
    unit.request = r;
    int64_t heads_apart;  // heads of one kv head in one item
    int64_t block;
    if (plan.heads.by_query) {
      heads_apart = ceil_div(plan.heads.shared, ceil_div(plan.heads.shared, kBlockRows));
      block = kBlockRows / heads_apart;
    } else {
      block = count < kBlockRows ? count : kBlockRows;
      heads_apart = kBlockRows / block < plan.heads.shared ? kBlockRows / block : plan.heads.shared;
    }
    unit.heads = heads_apart;
    unit.head_blocks = plan.heads.total / plan.heads.shared * ceil_div(plan.heads.shared, heads_apart);
    for (int64_t b = ceil_div(count, block) - 1; b >= 0; b--) {
      const int64_t q = b * block;
      unit.token = start + q;
      unit.position = first_position + q;
      unit.queries = count - q < block ? count - q : block;
      const int64_t low = plan.window > 0 && unit.position >= plan.window ? unit.position - plan.window + 1 : 0;
      unit.first_chunk = low / kChunk;
      unit.chunks = (unit.position + unit.queries - 1) / kChunk + 1 - unit.first_chunk;
      unit.pieces = 1;
      unit.piece = unit.chunks;
      if (plan.fair > 0) {
        const int64_t most = plan.fair / (unit.queries * unit.heads + 8);
        const int64_t pieces = unit.chunks / (most > 1 ? most : 1);
        if (pieces > 1) {
          unit.piece = ceil_div(unit.chunks, pieces);
          unit.pieces = ceil_div(unit.chunks, unit.piece);
        }
      }
      unit.items = unit.head_blocks * unit.pieces;
      unit.first_item = item;
      unit.parts = parts;
      item += unit.items;
      unit.row_floats = unit.chunks * plan.part_floats + plan.query_floats;
      if (unit.pieces > 1) parts += unit.queries * plan.heads.total * unit.row_floats;
      body(unit);
    }
  }
}

// Decide how fine to cut; returns how many floats the parts of all cut units take.
static inline int64_t settle(Plan &plan, int threads) {
  int64_t cost = 0, floats = 0;
  if (threads > 1)
    for_units(plan, [&](const Unit &u) { cost += u.head_blocks * u.chunks * (u.queries * u.heads + 8); });
  plan.fair = threads > 1 ? cost / (threads * 3) + 1 : 0;
  for_units(plan, [&](const Unit &u) {
    plan.items = u.first_item + u.items;
    if (u.pieces > 1) floats = u.parts + u.queries * plan.heads.total * u.row_floats;
  });
  return floats;
}

// An item: rows [queries x heads], chunks [first, first + count).
struct Item {
  int64_t kv_head, first_head, heads;
  int64_t first_chunk, chunks;
  int64_t parts;  // floats before those of its first row: parts for the unit's chunks, then the query
};

static inline Item item_of(const Plan &plan, const Unit &unit, int64_t number) {
  const int64_t block = number / unit.pieces, piece = number % unit.pieces;
  const int64_t blocks = ceil_div(plan.heads.shared, unit.heads);
  Item item;
  item.kv_head = block / blocks;
  const int64_t inside = block % blocks * unit.heads;
  item.first_head = item.kv_head * plan.heads.shared + inside;
  item.heads = plan.heads.shared - inside < unit.heads ? plan.heads.shared - inside : unit.heads;
  item.first_chunk = unit.first_chunk + piece * unit.piece;
  const int64_t left = unit.first_chunk + unit.chunks - item.first_chunk;
  item.chunks = left < unit.piece ? left : unit.piece;
  item.parts = unit.parts + item.first_head * unit.queries * unit.row_floats;
  return item;
}

// This thread's own place for one item's rows.
struct Bench {
  Part *sofar;   // [kBlockRows]
  float *mixed;  // [kBlockRows, value_width]
};

// Take an item's chunks in order with chunk(number, to). True where that finishes its rows: results in bench.mixed.
// Else their parts are kept, for `join_parts`.
template <class Chunk>
static inline bool walk(const Plan &plan, const Unit &unit, const Item &item, const Rows &rows, const ScoreRule &rule,
                        const Bench &bench, float *parts, Chunk chunk) {
  if (unit.pieces > 1) {
    Apart to{parts + item.parts + (item.first_chunk - unit.first_chunk) * plan.part_floats, unit.row_floats};
    for (int64_t c = 0; c < item.chunks; c++, to.at += plan.part_floats) chunk(item.first_chunk + c, to);
    return false;
  }
  for (int64_t r = 0; r < rows.count; r++) bench.sofar[r] = nothing_yet(rule, rows.head_of(r));
  std::memset(bench.mixed, 0, sizeof(float) * (std::size_t)(rows.count * rows.value_width));
  const Joined to{bench.sofar, bench.mixed};
  for (int64_t c = 0; c < item.chunks; c++) chunk(item.first_chunk + c, to);
  for (int64_t r = 0; r < rows.count; r++) finish(bench.sofar[r], bench.mixed + r * rows.value_width, rows.value_width);
  return true;
}

// Rows of cut units, dealt to threads in turn: join a row's parts in bench.mixed, then give(token, head).
template <class Give>
static inline void join_parts(const Plan &plan, const ScoreRule &rule, const Bench &bench, const float *parts,
                              const Worker &w, Give give) {
  const int64_t width = plan.part_floats - 2;
  int64_t turn = 0;
  for_units(plan, [&](const Unit &unit) {
    for (int64_t block = 0; block < unit.head_blocks && unit.pieces > 1; block++) {
      const Item item = item_of(plan, unit, block * unit.pieces);
      for (int64_t r = 0; r < unit.queries * item.heads; r++) {
        if (turn++ % w.threads != w.thread) continue;
        const int64_t head = item.first_head + r % item.heads;
        const float *at = parts + item.parts + r * unit.row_floats;
        bench.sofar[0] = nothing_yet(rule, head);
        std::memset(bench.mixed, 0, sizeof(float) * (std::size_t)width);
        for (int64_t c = 0; c < unit.chunks; c++, at += plan.part_floats) {
          const Part part{at[0], at[1]};
          join<1>(bench.sofar, bench.mixed, &part, at + 2, width);
        }
        finish(bench.sofar[0], bench.mixed, width);
        give(unit.token + r / item.heads, head);
      }
    }
  });
}

HP_END
