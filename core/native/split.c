/* Splits an input of a graph. DALI's operator NumbaFuncImpl calls the functions for a whole batch
 * (dali/operators/numba_function/numba_func.cc): the pointers and shapes of all samples follow each
 * other, output by output. `joined_draws.py` adds it to graphs.
 */

#include <stdint.h>
#include <string.h>

/* Input: [outputs, ...]. The shape of each output is the rest. */
void dalijax_split_shapes(
    int64_t **outs, const void *out_ndims, int32_t n_out, int64_t **ins, const int32_t *in_ndims,
    int32_t n_in, int32_t samples) {
  for (int k = 0; k < n_out * samples; k++)
    memcpy(outs[k], ins[k % samples] + 1, sizeof(int64_t) * (in_ndims[0] - 1));
}

static void split(
    void **outs, int32_t n_out, void **ins, int64_t **in_shapes, int32_t ndim, int32_t samples,
    int64_t bytes) {
  for (int i = 0; i < samples; i++) {
    int64_t length = bytes;
    for (int k = 1; k < ndim; k++) length *= in_shapes[i][k];
    const char *from = ins[i];
    for (int k = 0; k < n_out; k++) memcpy(outs[k * samples + i], from + k * length, length);
  }
}

#define SPLIT(bytes)                                                                             \
  void dalijax_split_##bytes(                                                                    \
      void **outs, int64_t **out_shapes, const void *out_ndims, int32_t n_out, void **ins,       \
      int64_t **in_shapes, const int32_t *in_ndims, int32_t n_in, int32_t samples) {             \
    split(outs, n_out, ins, in_shapes, in_ndims[0], samples, bytes);                             \
  }

SPLIT(1)
SPLIT(2)
SPLIT(4)
SPLIT(8)
