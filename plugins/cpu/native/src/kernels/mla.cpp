// HP_MLA: multi-head latent attention (DeepSeek-V2). The pools hold one latent and one rope key per token; kv_b is
// applied to queries and results instead of to every key:
//
//     absorbed query  [W_k^T q_nope | q_rope]       key  [latent | rope key]       value  latent       out  W_v mixed
//
// so that all heads share keys of width latent + rope. Few queries: an item takes many heads of each, to read the keys
// once. Many queries: an item takes one head, to read its part of kv_b once.
#include "attention_keys.h"

HP_BEGIN

namespace {

template <class Number>
class LatentAttention {
 public:
  using Type = typename Number::type;

  LatentAttention(const hp_op &op, const hp_batch &batch, const Worker &worker)
      : op_(op), batch_(batch), group_(batch.groups[op.i[5]]), w_(worker) {
    heads_ = op.i[0], nope_ = op.i[1], rope_ = op.i[2], latent_ = op.i[3], out_width_ = op.i[4];
    latents_ = Pool<Number>{(Type *)op.p[4], nullptr, 1, latent_};
    ropes_ = Pool<Number>{(Type *)op.p[5], nullptr, 1, rope_};
    rule_ = ScoreRule{0, 0, nullptr, nullptr};
    value_width_ = padded(latent_);
    width_ = value_width_ + padded(rope_);
    plan_ = Plan{&batch, Heads{heads_, heads_, false}, 0, 2 + value_width_, width_};
    const int64_t most = nope_ > out_width_ ? nope_ : out_width_, pointers = (most + 8) * 2;
    float *at = (float *)w_.scratch(sizeof(float) * (std::size_t)(kBlockRows * (width_ + value_width_ + 2 + nope_) +
                                                                  kTileRows * (kChunk + value_width_ + out_width_ + 8) +
                                                                  kChunk * width_ + pointers));
    const auto take = [&at](int64_t floats) { return (at += floats) - floats; };
    weight_rows_ = (const float **)take(pointers);
    q_ = take(kBlockRows * width_), bench_.mixed = take(kBlockRows * value_width_);
    copies_ = take(kChunk * width_), scores_ = take(kTileRows * (kChunk + value_width_));
    scaled_ = take(kBlockRows * nope_), results_ = take(kTileRows * (out_width_ + 8));
    bench_.sofar = (Part *)take(kBlockRows * 2);
  }

  void run(int64_t rows) {
    const int64_t floats = settle(plan_, w_.threads);
    float *parts = floats ? (float *)w_.shared_scratch(sizeof(float) * (std::size_t)floats) : nullptr;
    store_new(rows);
    if (floats) absorb_cut(parts);
    w_.barrier();
    int64_t mine = w_.next_work();
    for_units(plan_, [&](const Unit &unit) {
      for (; mine < unit.first_item + unit.items; mine = w_.next_work())
        attend(unit, item_of(plan_, unit, mine - unit.first_item), parts);
    });
    if (!floats) return;
    w_.barrier();
    join_parts(plan_, rule_, bench_, parts, w_, [&](int64_t token, int64_t head) { expand(1, 1, token, head); });
  }

 private:
  void store_new(int64_t rows) {
    const int64_t real = batch_.query_start[batch_.num_requests];
    int64_t begin, end;
    share(real, 1, w_, begin, end);
    for (int64_t token = begin; token < end; token++) {
      const int64_t slot = group_.slots[token];
      store_row<Number>((const float *)op_.p[2] + token * op_.i[8], latent_, latents_.row(slot, 0), nullptr);
      store_row<Number>((const float *)op_.p[3] + token * op_.i[9], rope_, ropes_.row(slot, 0), nullptr);
    }
    share(rows - real, 1, w_, begin, end);
    for (int64_t token = real + begin; token < real + end; token++)
      std::memset(out(token, 0), 0, sizeof(float) * (std::size_t)(heads_ * out_width_));
  }

  float *out(int64_t token, int64_t head) const { return (float *)op_.p[7] + (token * heads_ + head) * out_width_; }

  // kv_b's rows of a head, from `first` on: nope_ that make keys, then out_width_ that make values.
  const float *weights(int64_t head, int64_t first) const {
    return (const float *)op_.p[6] + (head * (nope_ + out_width_) + first) * latent_;
  }

  // Absorbed queries of some queries of one head: q[n * stride] for n < count.
  void absorb(int64_t token, int64_t head, int64_t count, float *q, int64_t stride) {
    for (int64_t n = 0; n < count; n++) {
      const float *nope = (const float *)op_.p[0] + (token + n) * op_.i[6] + head * nope_;
      const float *rope = (const float *)op_.p[1] + (token + n) * op_.i[7] + head * rope_;
      std::memset(q + n * stride, 0, sizeof(float) * (std::size_t)width_);
      for (int64_t i = 0; i < nope_; i++) scaled_[n * nope_ + i] = nope[i] * op_.f[0];
      for (int64_t i = 0; i < rope_; i++) q[n * stride + value_width_ + i] = rope[i] * op_.f[0];
    }
    const float *rows = weights(head, 0);
    if (latent_ % W == 0) {
      for (int64_t i = 0; i < nope_; i++) weight_rows_[i] = rows + i * latent_;
      for_tiles(count, [&](auto tile, int64_t n) {
        mix<Float32, decltype(tile)::value>(scaled_ + n * nope_, nope_, weight_rows_, 0, (int)nope_, latent_,
                                            q + n * stride, stride);
      });
      return;
    }
    for (int64_t n = 0; n < count; n++)
      for (int64_t i = 0; i < nope_; i++)
        for (int64_t c = 0; c < latent_; c++) q[n * stride + c] += scaled_[n * nope_ + i] * rows[i * latent_ + c];
  }

  // Absorbed queries of cut units, made once for all pieces: (unit, head) pairs dealt to threads in turn.
  void absorb_cut(float *parts) {
    int64_t turn = 0;
    for_units(plan_, [&](const Unit &unit) {
      for (int64_t block = 0; block < unit.head_blocks && unit.pieces > 1; block++) {
        const Item item = item_of(plan_, unit, block * unit.pieces);
        for (int64_t h = 0; h < item.heads; h++) {
          if (turn++ % w_.threads != w_.thread) continue;
          float *row = parts + item.parts + h * unit.row_floats + unit.chunks * plan_.part_floats;
          absorb(unit.token, item.first_head + h, unit.queries, row, item.heads * unit.row_floats);
        }
      }
    });
  }

  void attend(const Unit &unit, const Item &item, float *parts) {
    Rows rows{unit.queries * item.heads, item.heads, unit.position, item.first_head, q_, width_, width_, value_width_};
    if (unit.pieces > 1) {
      rows.q = parts + item.parts + unit.chunks * plan_.part_floats;
      rows.q_stride = unit.row_floats;
    } else {
      for (int64_t h = 0; h < item.heads; h++)
        absorb(unit.token, item.first_head + h, unit.queries, q_ + h * width_, item.heads * width_);
    }
    const bool whole = walk(plan_, unit, item, rows, rule_, bench_, parts, [&](int64_t number, const auto &to) {
      Keys<float> keys;
      copy(unit, number, keys);
      attend_chunk<Float32>(rows, rule_, keys, scores_, to);
    });
    if (!whole) return;
    for (int64_t h = 0; h < item.heads; h++)
      expand(unit.queries, item.heads, unit.token, item.first_head + h, h);
  }

  void copy(const Unit &unit, int64_t number, Keys<float> &keys) {
    keys.start = number * kChunk;
    bound(plan_, unit, keys.start, keys.low, keys.high);
    keys.scaled = false;
    keys.next = nullptr;
    for_slots(batch_, group_, unit.request, keys.start, keys.low, keys.high, [&](int k, int64_t slot) {
      float *key = copies_ + k * width_;
      widen<Number>(latents_.row(slot, 0), latent_, key);
      widen<Number>(ropes_.row(slot, 0), rope_, key + value_width_);
      keys.key[k] = keys.value[k] = key;
    });
    repeat_ends(keys.key, keys.low, keys.high);
  }

  // Results of one head's queries out of rows first, first + every ... of bench_.mixed.
  void expand(int64_t count, int64_t every, int64_t token, int64_t head, int64_t first = 0) {
    const float *mixed = bench_.mixed + first * value_width_, *rows = weights(head, nope_);
    const int64_t stride = every * value_width_;
    if (latent_ % W) {
      for (int64_t n = 0; n < count; n++)
        for (int64_t v = 0; v < out_width_; v++) {
          float total = 0;
          for (int64_t c = 0; c < latent_; c++) total += mixed[n * stride + c] * rows[v * latent_ + c];
          out(token + n, head)[v] = total;
        }
      return;
    }
    const int64_t room = (out_width_ + 7) / 8 * 8;
    for (int64_t v = 0; v < room; v++) weight_rows_[v] = rows + (v < out_width_ ? v : out_width_ - 1) * latent_;
    for_tiles(count, [&](auto tile, int64_t n) {
      constexpr int R = decltype(tile)::value, N = R == 1 ? 8 : 4;
      for (int64_t v = 0; v < room; v += N)
        dots<Float32, R, N>(mixed + n * stride, stride, weight_rows_ + v, latent_, results_ + v, room);
      for (int r = 0; r < R; r++)
        std::memcpy(out(token + n + r, head), results_ + r * room, sizeof(float) * (std::size_t)out_width_);
    });
  }

  const hp_op &op_;
  const hp_batch &batch_;
  const hp_group &group_;
  const Worker &w_;
  int64_t heads_, nope_, rope_, latent_, out_width_, width_, value_width_;
  Pool<Number> latents_, ropes_;
  ScoreRule rule_;
  Plan plan_;
  const float **weight_rows_;
  float *q_, *copies_, *scores_, *scaled_, *results_;
  Bench bench_;
};

// p0 q_nope [rows, heads, i1], p1 q_rope [rows, heads, i2], p2 latent [rows, i3], p3 k_rope [rows, i2], p4 latent pool,
// p5 rope pool, p6 kv_b [heads, i1 + i4, i3], p7 out [rows, heads, i4]; i0 heads, i1 nope, i2 rope, i3 latent, i4 v dim,
// i5 group, i6..i9 row strides of p0..p3, i10 pool dtype; f0 scale.
// Stores latents and rope keys of real tokens, then attends. Rows of padding become zero.
void mla(const hp_op &op, int64_t rows, const hp_batch *batch, const Worker &w) {
  switch (op.i[10]) {
    case HP_F16: return LatentAttention<Float16>(op, *batch, w).run(rows);
    case HP_BF16: return LatentAttention<Brain16>(op, *batch, w).run(rows);
    default: return LatentAttention<Float32>(op, *batch, w).run(rows);
  }
}

}  // namespace

void add_mla(KernelTable &table) { table.run[HP_MLA] = mla; }

HP_END
