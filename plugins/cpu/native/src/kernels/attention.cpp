// HP_ATTENTION: paged attention, full or sliding, with grouped heads, sinks, soft cap and ALiBi.
// (attention_chunk.h: the arithmetic; attention_plan.h: how work is cut; mla.cpp: HP_MLA.)
#include "attention_keys.h"

HP_BEGIN

namespace {

// Items of up to so many rows read keys where they lie. More rows pay for widening a copy.
constexpr int64_t kDirectRows = 8;

template <class Number>
class Attention {
 public:
  using Type = typename Number::type;

  Attention(const hp_op &op, const hp_batch &batch, const Worker &worker)
      : op_(op), batch_(batch), group_(batch.groups[op.i[4]]), w_(worker) {
    heads_ = op.i[0], kv_heads_ = op.i[1], width_ = op.i[2], value_width_ = op.i[3];
    keys_ = Pool<Number>{(Type *)op.p[3], (float *)op.p[8], kv_heads_, width_};
    values_ = Pool<Number>{(Type *)op.p[4], (float *)op.p[9], kv_heads_, value_width_};
    rule_ = ScoreRule{op.i[5], op.f[1], (const float *)op.p[7], (const float *)op.p[6]};
    plan_ = Plan{&batch, Heads{heads_, heads_ / kv_heads_, true}, op.i[5], 2 + padded(value_width_), 0};
    const int64_t q = padded(width_), v = padded(value_width_);
    float *at = (float *)w_.scratch(sizeof(float) * (std::size_t)(kBlockRows * (q + v + 2) +
                                                                  kTileRows * (kChunk + v) + kChunk * (q + v)));
    const auto take = [&at](int64_t floats) { return (at += floats) - floats; };
    q_ = take(kBlockRows * q), bench_.mixed = take(kBlockRows * v), scores_ = take(kTileRows * (kChunk + v));
    key_copies_ = take(kChunk * q), value_copies_ = take(kChunk * v), bench_.sofar = (Part *)take(kBlockRows * 2);
  }

  void run(int64_t rows) {
    const int64_t floats = settle(plan_, w_.threads);
    store_new(rows);
    float *parts = floats ? (float *)w_.shared_scratch(sizeof(float) * (std::size_t)floats) : nullptr;
    w_.barrier();
    take_items(parts);
    if (!floats) return;
    w_.barrier();
    join_parts(plan_, rule_, bench_, parts, w_, [&](int64_t token, int64_t head) { give(0, token, head); });
  }

 private:
  // What a thread has taken to do.
  struct Task {
    Unit unit;
    Item item;
    bool direct;
  };

  // Work through items as they are handed out. The next one is taken before this one is begun, while there are plenty,
  // so that its first keys can be fetched ahead.
  void take_items(float *parts) {
    Task held{};
    bool holds = false;
    int64_t mine = w_.next_work();
    for_units(plan_, [&](const Unit &unit) {
      for (; mine < unit.first_item + unit.items; mine = w_.next_work()) {
        const Item item = item_of(plan_, unit, mine - unit.first_item);
        const Task task{unit, item, unit.queries * item.heads <= kDirectRows && whole_vectors()};
        if (holds) attend(held, task.direct ? &task : nullptr, parts);
        holds = task.direct && mine + w_.threads < plan_.items;
        if (holds) held = task;
        else attend(task, nullptr, parts);
      }
    });
    if (holds) attend(held, nullptr, parts);
  }

  bool whole_vectors() const { return width_ % W == 0 && value_width_ % W == 0; }

  // This thread's share of the step's keys and values, and of the padding's zeros.
  void store_new(int64_t rows) {
    const int64_t real = batch_.query_start[batch_.num_requests];
    int64_t begin, end;
    share(real * kv_heads_, 1, w_, begin, end);
    for (int64_t item = begin; item < end; item++) {
      const int64_t token = item / kv_heads_, head = item % kv_heads_, slot = group_.slots[token];
      store_row<Number>((const float *)op_.p[1] + token * op_.i[7] + head * width_, width_, keys_.row(slot, head),
                        keys_.scale(slot, head));
      store_row<Number>((const float *)op_.p[2] + token * op_.i[8] + head * value_width_, value_width_,
                        values_.row(slot, head), values_.scale(slot, head));
    }
    share(rows - real, 1, w_, begin, end);
    for (int64_t token = real + begin; token < real + end; token++)
      std::memset(out(token, 0), 0, sizeof(float) * (std::size_t)(heads_ * value_width_));
  }

  float *out(int64_t token, int64_t head) const {
    return (float *)op_.p[5] + token * op_.i[9] + head * value_width_;
  }

  void give(int64_t row, int64_t token, int64_t head) const {
    std::memcpy(out(token, head), bench_.mixed + row * padded(value_width_),
                sizeof(float) * (std::size_t)value_width_);
  }

  void attend(const Task &task, const Task *following, float *parts) {
    const Unit &unit = task.unit;
    const Item &item = task.item;
    const int64_t width = padded(width_);
    const Rows rows{unit.queries * item.heads, item.heads, unit.position, item.first_head, q_, width,
                    width,                     padded(value_width_)};
    for (int64_t r = 0; r < rows.count; r++)
      take_query((const float *)op_.p[0] + (unit.token + r / item.heads) * op_.i[6] + rows.head_of(r) * width_,
                 q_ + r * width);
    if (task.direct && !ready_) locate(task, item.first_chunk, near_[turn_]);
    ready_ = false;
    const bool whole = walk(plan_, unit, item, rows, rule_, bench_, parts, [&](int64_t number, const auto &to) {
      if (!task.direct) {
        Keys<float> keys;
        copy(unit, item, number, keys);
        return attend_chunk<Float32>(rows, rule_, keys, scores_, to);
      }
      Keys<Type> &keys = near_[turn_], &next = near_[turn_ ^= 1];
      keys.next = &next;
      if (number + 1 < item.first_chunk + item.chunks) {
        locate(task, number + 1, next);
      } else if (following) {
        locate(*following, following->item.first_chunk, next);
        ready_ = true;
      } else {
        keys.next = nullptr;
      }
      attend_chunk<Number>(rows, rule_, keys, scores_, to);
    });
    if (!whole) return;
    for (int64_t r = 0; r < rows.count; r++) give(r, unit.token + r / item.heads, rows.head_of(r));
  }

  void take_query(const float *from, float *q) const {
    int64_t i = 0;
    for (; i + W <= width_; i += W) store(q + i, load(from + i) * splat(op_.f[0]));
    if (i == width_) return;
    store(q + i, vf{});
    for (; i < width_; i++) q[i] = from[i] * op_.f[0];
  }

  // Point to a chunk's keys and values in the pools.
  void locate(const Task &task, int64_t number, Keys<Type> &keys) const {
    begin(keys, task.unit, number);
    const int64_t head = task.item.kv_head;
    for_slots(batch_, group_, task.unit.request, keys.start, keys.low, keys.high, [&](int k, int64_t slot) {
      keys.key[k] = keys_.row(slot, head);
      keys.value[k] = values_.row(slot, head);
      scales(keys, k, slot, head);
    });
    repeat_ends(keys.key, keys.low, keys.high);
    repeat_ends(keys.value, keys.low, keys.high);
  }

  // Copy a chunk's keys and values as padded float32.
  void copy(const Unit &unit, const Item &item, int64_t number, Keys<float> &keys) {
    const int64_t width = padded(width_), value_width = padded(value_width_);
    begin(keys, unit, number);
    for_slots(batch_, group_, unit.request, keys.start, keys.low, keys.high, [&](int k, int64_t slot) {
      widen<Number>(keys_.row(slot, item.kv_head), width_, key_copies_ + k * width);
      widen<Number>(values_.row(slot, item.kv_head), value_width_, value_copies_ + k * value_width);
      keys.key[k] = key_copies_ + k * width;
      keys.value[k] = value_copies_ + k * value_width;
      scales(keys, k, slot, item.kv_head);
    });
    repeat_ends(keys.key, keys.low, keys.high);
  }

  template <class Any>
  void begin(Keys<Any> &keys, const Unit &unit, int64_t number) const {
    keys.start = number * kChunk;
    bound(plan_, unit, keys.start, keys.low, keys.high);
    keys.scaled = keys_.scales != nullptr;
    keys.next = nullptr;
  }
  template <class Any>
  void scales(Keys<Any> &keys, int k, int64_t slot, int64_t head) const {
    if (!keys.scaled) return;
    keys.key_scale[k] = *keys_.scale(slot, head);
    keys.value_scale[k] = *values_.scale(slot, head);
  }

  const hp_op &op_;
  const hp_batch &batch_;
  const hp_group &group_;
  const Worker &w_;
  int64_t heads_, kv_heads_, width_, value_width_;
  Pool<Number> keys_, values_;
  ScoreRule rule_;
  Plan plan_;
  float *q_, *scores_, *key_copies_, *value_copies_;
  Bench bench_;
  Keys<Type> near_[2];  // the chunk that is read and the one after it, for direct tasks
  int turn_ = 0;
  bool ready_ = false;  // near_[turn_] is the next task's first chunk already
};

// p0 q, p1 k, p2 v, p3 key pool, p4 value pool, p5 out, p6 sinks [heads], p7 alibi slopes [heads], p8/p9 float scales per
// (slot, head) of int8 keys / values; i0 heads, i1 kv_heads, i2 head_dim, i3 v_head_dim, i4 group, i5 window (0 all),
// i6 q, i7 k, i8 v, i9 out row stride, i10 pool dtype; f0 scale, f1 softcap (0 none).
// Stores k and v of real tokens at their slots, then attends. Rows of padding become zero.
void attention(const hp_op &op, int64_t rows, const hp_batch *batch, const Worker &w) {
  switch (op.i[10]) {
    case HP_F16: return Attention<Float16>(op, *batch, w).run(rows);
    case HP_BF16: return Attention<Brain16>(op, *batch, w).run(rows);
    case HP_I8: return Attention<Int8>(op, *batch, w).run(rows);
    default: return Attention<Float32>(op, *batch, w).run(rows);
  }
}

}  // namespace

void add_mla(KernelTable &);

void add_attention(KernelTable &table) {
  table.run[HP_ATTENTION] = attention;
  add_mla(table);
}

HP_END
