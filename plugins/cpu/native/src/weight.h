// A weight matrix as the GEMM kernels read it. Not per variant: every variant reads the same layout.
//
// Rows are cut into panels of 16; the rows that the last panel lacks are zeros. Within a panel, columns are cut into blocks
// of 32, the last one filled up with codes of scale zero. A slice is 4 columns of the panel's 16 rows: 64 codes, byte
// row * 4 + column, so that one 32-bit broadcast of activations meets every row, and each row sums in a lane of its own.
//
//   kU4, kTable4, kTable6  [panel][block][4][64 B]  slice v: low nibbles are columns 4v.., high nibbles columns 16 + 4v..
//   kU5  [panel][block][5][64 B]  slices 0..3 as kU4; bit v of slice 4: the high bit of slice v's codes
//   kU6  [panel][block][6][64 B]  slices 0..3 as kU4; slices 4, 5: two high bits of each code (see gemm_dot.h)
//   kI8  [panel][block][8][64 B]  slice v: columns 4v..
//   kBytes6  as kI8, codes below 64: what kU5, kU6 and kTable6 are unpacked to, never stored
//   kF32, kF16, kBF16  [panel][column][16]
//
// Scales and offsets stay in the number type that they came in, [panel][group][16]; kernels widen a panel's at a time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hp.h"

namespace hp {

struct WeightBlock;

constexpr int kRows = 16;   // rows of a panel
constexpr int kBlock = 32;  // columns of a block
constexpr int kSliceBytes = 64;

// kTable6: kTable4 where no entry is larger than 32 in size. kU5, kU6, kTable6 and kBytes6 hold codes less `base`, so that
// they are not negative; sums make up for it exactly (see `start` in gemm_dot.h).
enum class Codes : int32_t { kU4, kTable4, kTable6, kU5, kU6, kBytes6, kI8, kF32, kF16, kBF16 };

inline bool is_float(Codes codes) { return codes >= Codes::kF32; }

// Whether codes are stored less `base`.
constexpr bool is_based(Codes codes) { return codes >= Codes::kTable6 && codes <= Codes::kBytes6; }

// Bytes of one block (integers) or one column (floats) of a panel.
constexpr int64_t unit_bytes(Codes codes) {
  switch (codes) {
    case Codes::kU4:
    case Codes::kTable4:
    case Codes::kTable6: return 4 * kSliceBytes;
    case Codes::kU5: return 5 * kSliceBytes;
    case Codes::kU6: return 6 * kSliceBytes;
    case Codes::kBytes6:
    case Codes::kI8: return 8 * kSliceBytes;
    case Codes::kF32: return kRows * 4;
    default: return kRows * 2;
  }
}

// One level of scales or offsets: [panel][count][16] numbers of `dtype`.
struct Level {
  char *data = nullptr;
  int32_t dtype = HP_F32;
  int64_t count = 0;  // per row
};

inline int64_t number_bytes(int32_t dtype) { return dtype == HP_F32 ? 4 : dtype == HP_I8 || dtype == HP_U8 ? 1 : 2; }

}  // namespace hp

struct hp_weight {
  int64_t rows = 0, columns = 0;
  int64_t panels = 0;
  int64_t units = 0;  // blocks (integers) or columns (floats) of a panel
  hp::Codes codes = hp::Codes::kF32;
  // Integers only:
  bool halves = false;           // a scale per 16 columns instead of one per `blocks_per_scale` blocks
  int64_t blocks_per_scale = 1;  // where not halves
  int64_t super_group = 0;       // scales per second-level scale, 0: one level
  bool offset = false;           // whether weights have an offset: `offsets`, or -zero * scale where those are absent
  float zero = 0.f;
  hp::Level scales, offsets, super_scales, super_offsets;
  int32_t base = 0;                   // kU5, kU6, kTable6: 0, -16 or -32
  alignas(16) int8_t table[16] = {};  // kTable4, and less `base` kTable6
  float unit = 1.f;                   // every scale is multiplied with it: what one step of a codebook is worth
  char *code_data = nullptr;

  hp::WeightBlock *block = nullptr;  // what the memory is part of
  int64_t bytes = 0;
  char layout[96] = {};
};

namespace hp {

// Memory of a pool's weights. Those that fill no large pages alone lie one behind the other in blocks that do; a block goes
// when its last weight and the pool do. For one thread at a time; weights may go on any.
class WeightMemory {
 public:
  WeightMemory() = default;
  WeightMemory(const WeightMemory &) = delete;
  ~WeightMemory();
  // NULL where memory is lacking. `block`: what the caller is a holder of then.
  char *take(int64_t bytes, WeightBlock *&block);

 private:
  static constexpr int64_t kShared = int64_t{4} << 20, kBlockBytes = int64_t{16} << 20;

  WeightBlock *open_ = nullptr;
};

// Allocate memory for the sizes and levels that `weight` states (a level with count 0 is absent) and point into it. False
// where memory is lacking.
bool allocate(hp_weight &weight, WeightMemory &from);

// Fill in `layout`.
void name_layout(hp_weight &weight);

}  // namespace hp
