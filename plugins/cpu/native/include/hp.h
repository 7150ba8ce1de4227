/* The C interface of Hardpoint's CPU kernels.
 *
 * A step is a list of `hp_op` records on fixed buffers. `hp_run` plays the list: every op is worked on by all threads of
 * the pool, with a barrier behind each. One op alone is a list of one. Activations are float32, row-major; a row is a
 * token (or a request, for the logits), so that the same list serves any number of rows.
 *
 * Promise: a row's result does not depend on the other rows of the call, on the number of threads, or on how a sequence
 * was cut into steps. Kernels sum in an order that follows from the row alone.
 */
#ifndef HP_H
#define HP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HP_ABI 1

/* How many rows an op has. */
enum hp_rows { HP_ROWS_FIXED = 0, HP_ROWS_TOKENS = 1, HP_ROWS_DRAWS = 2 };

enum hp_code {
  HP_NOP = 0,
  /* pointwise.cpp */
  HP_EMBED = 1,
  HP_GATHER = 2,
  HP_NORM = 3,
  HP_ADD_NORM = 4,
  HP_ROPE = 5,
  HP_ACTIVATE = 6,
  HP_GATED = 7,
  HP_SCALE_CAP = 8,
  HP_ADD = 9,
  HP_COPY = 10,
  /* gemm.cpp */
  HP_LINEAR = 20,
  HP_EXPERTS = 21,
  /* attention.cpp */
  HP_ATTENTION = 30,
  HP_MLA = 31,
  /* sampling.cpp */
  HP_ARGMAX = 40,
  HP_SAMPLE = 41,
  HP_LOGPROBS = 42,
  HP_ROUTE = 43,
  HP_PENALTIES = 44,
  HP_BIAS = 45,
  /* state.cpp */
  HP_LORA = 50,
  HP_CONV_STATE = 51,
  HP_SSM_SCAN = 52,
  HP_GATED_DELTA = 53,
  /* ceiling.cpp */
  HP_CEILING = 60,
  HP_CODES = 64
};

/* One call of one kernel. What p, i and f mean is said at each kernel. */
typedef struct hp_op {
  int32_t code;
  int32_t rows_of; /* enum hp_rows */
  int64_t rows;    /* for HP_ROWS_FIXED */
  void *p[12];
  int64_t i[20];
  float f[4];
} hp_op;

/* Page table and slots of one cache group. */
typedef struct hp_group {
  const int32_t *page_table; /* [num_requests, table_stride] */
  int64_t table_stride;
  const int32_t *slots; /* [tokens] */
} hp_group;

/* The ragged batch of a step. */
typedef struct hp_batch {
  int64_t tokens;       /* rows of HP_ROWS_TOKENS */
  int64_t draws;        /* rows of HP_ROWS_DRAWS */
  int64_t num_requests; /* requests with tokens */
  int64_t page_tokens;
  const int32_t *query_start; /* [num_requests + 1] */
  const int32_t *seq_lens;    /* [num_requests], tokens after this step */
  const hp_group *groups;
  int64_t num_groups;
} hp_batch;

typedef struct hp_pool hp_pool;

/* Version of this interface, to compare with HP_ABI. */
int32_t hp_abi(void);

/* Variants that were compiled, and whether this processor runs them: "avx2 1\nbaseline 1\n...", best first. */
const char *hp_variants(void);

/* Use a variant for the whole process; NULL for the best. Returns its name, or NULL where it cannot be. */
const char *hp_use(const char *variant);

/* A pool of `threads` threads, the caller's included. cpus: processors to pin them to, or NULL. Returns NULL on failure. */
hp_pool *hp_pool_new(int32_t threads, const int32_t *cpus);
void hp_pool_free(hp_pool *pool);
int32_t hp_pool_threads(const hp_pool *pool);

/* Play ops in order. Returns 0, or 1 + the index of the first op that no kernel takes. batch may be NULL for fixed rows. */
int64_t hp_run(hp_pool *pool, const hp_op *ops, int64_t count, const hp_batch *batch);

/* Seconds spent in each op code since the last call, until the last thread was done; fills seconds[HP_CODES]. For
 * `bench kernels`. */
void hp_profile(double *seconds);

/* Weights of HP_LINEAR and HP_EXPERTS: repacked once (gemm.cpp). */
typedef struct hp_weight hp_weight;

/* dtypes of plain numbers */
enum hp_dtype { HP_F32 = 0, HP_F16 = 1, HP_BF16 = 2, HP_I8 = 3, HP_U8 = 4 };

/* A neutral quantized (or plain) matrix [rows, columns], as hardpoint_platforms.quant lays it out. */
typedef struct hp_matrix {
  int64_t rows, columns;
  int32_t packing;             /* 0 plain `values` of dtype values_dtype, 1 int8, 2 uint4 two per byte */
  int32_t values_dtype;        /* enum hp_dtype */
  int64_t group, super_group;  /* columns per scale; groups per second-level scale (0: one level) */
  const void *values;
  const void *scales, *offsets, *super_scales, *super_offsets; /* NULL where absent */
  int32_t scales_dtype, offsets_dtype, super_scales_dtype, super_offsets_dtype;
  const float *codebook; /* [256] or NULL: indexed by the stored integer (int8: + 128) */
} hp_matrix;

/* Repack on the pool's threads. exact: keep float32 products of dequantized weights. Returns NULL where the matrix is of a
 * kind that no kernel takes. The source may be freed afterwards. */
hp_weight *hp_weight_new(hp_pool *pool, const hp_matrix *matrix, int32_t exact);
void hp_weight_free(hp_weight *weight);
int64_t hp_weight_bytes(const hp_weight *weight);
/* Name of the layout chosen ("u4x8 group 32 with offsets"). */
const char *hp_weight_layout(const hp_weight *weight);

#ifdef __cplusplus
}
#endif
#endif
