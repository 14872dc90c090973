/* Resizes windows of uint8 images, and converts uint8 images by a table, on the CPU.
 *
 * DALI's operator for compiled functions calls `dalijax_resize_1` and `dalijax_table_1` in its
 * threads; `cpu_pixels.py` adds it to graphs. If pixels or arguments change, increase the numbers in
 * their names, and that in states: an older build may remain in the source folder.
 *
 * The filter is a triangle, as that of DALI's and Pillow's linear interpolation: its support is
 * larger than one pixel if the image becomes smaller (antialiasing). The window's coordinates are
 * those of pixel edges. Positions outside of the image have the value of the nearest pixel.
 *
 * Weights are computed by the basic operations in double, which IEEE 754 defines exactly (compile
 * with -ffp-contract=off), and pixels in whole numbers. So all x86-64 processors and compilers
 * compute the same pixels. Without SSE2, the code is slow; see `dalijax_resize_is_fast`.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__SSE2__) && !defined(DALIJAX_PLAIN)
#include <emmintrin.h>
#define FAST 1
#else
#define FAST 0
#endif

const int32_t dalijax_resize_is_fast = FAST;

enum {
  WEIGHT_BITS = 14, /* of the fraction of a weight */
  ONE = 1 << WEIGHT_BITS,
  ROW_BITS = 7, /* of the fraction of a value between the two passes: 255 << 7 fits into int16 */
  LANES = 16,   /* values that one step of the vertical pass computes */
  /* The scale from which on weights need more bits: a weight is about 1 / scale. */
  LARGE = 64,
  LIMIT = 1 << 20, /* of coordinates */
};

/* One axis of a window, which begins at `low` of the image. */
struct axis {
  double low;
  double scale; /* pixels of the image per output */
  double support; /* of the triangle, in pixels */
  int outputs;
  int flips;
  int begin, end; /* the pixels that the image has: from `begin` to before `end` */
  int room; /* maximum number of weights of an output; even */
};

/* The weights of one axis. Output k is the sum of weights[k * room + j] * input[first[k] + j] over
 * j < count. All sums of weights are ONE. */
struct filter {
  int outputs;
  int room;
  int count; /* weights that are used at most; even */
  int32_t *first;
  int16_t *weights;
};

static void *allocated(size_t size) {
  void *memory = malloc(size);
  if (!memory) abort(); /* DALI's operator can't report an error: deliver no wrong pixels */
  return memory;
}

static double bounded(float x) { /* NaN becomes -LIMIT */
  return x > -LIMIT ? (x < LIMIT ? x : LIMIT) : -LIMIT;
}

/* Returns the axis of a window from `start` to `end`; an end before the start flips. */
static struct axis axis_of(float start, float end, int outputs, int begin, int after) {
  double low = bounded(start), high = bounded(end);
  int flips = high < low;
  double scale = fabs(high - low) / outputs, support = scale > 1 ? scale : 1;
  int room = ((int)(2 * support) + 4) & ~1;
  struct axis axis = {flips ? high : low, scale, support, outputs, flips, begin, after, room};
  return axis;
}

/* Computes the weights of an output, whose sum is 1; returns their number.
 * first: receives the first pixel that has a weight, relative to `begin`. */
static int weights_of(const struct axis *axis, int output, double *weights, int *first) {
  int k = axis->flips ? axis->outputs - 1 - output : output;
  double center = axis->low + (k + 0.5) * axis->scale - 0.5, total = 0;
  int from = (int)floor(center - axis->support) + 1, to = (int)ceil(center + axis->support);
  /* The pixels at the edges stand for those outside. */
  int begin = from < axis->begin ? axis->begin : from >= axis->end ? axis->end - 1 : from;
  int end = to > axis->end ? axis->end : to <= begin ? begin + 1 : to;
  for (int j = 0; j < end - begin; j++) weights[j] = 0;
  for (int at = from; at < to; at++) {
    double weight = 1 - fabs(at - center) / axis->support;
    if (weight <= 0) continue;
    weights[(at < begin ? begin : at >= end ? end - 1 : at) - begin] += weight;
    total += weight;
  }
  for (int j = 0; j < end - begin; j++) weights[j] /= total;
  *first = begin - axis->begin;
  return end - begin;
}

static struct filter filter_of(const struct axis *axis) {
  int outputs = axis->outputs, room = axis->room;
  struct filter filter = {outputs, room, 0, 0, 0};
  filter.first = allocated(sizeof(int32_t) * outputs);
  filter.weights = allocated(sizeof(int16_t) * outputs * room);
  double *exact = allocated(sizeof(double) * room);
  for (int k = 0; k < outputs; k++) {
    int16_t *weights = filter.weights + (int64_t)k * room;
    int count = weights_of(axis, k, exact, filter.first + k);
    int sum = 0, largest = 0;
    for (int j = 0; j < count; j++) {
      weights[j] = (int16_t)floor(exact[j] * ONE + 0.5);
      sum += weights[j];
      if (weights[j] > weights[largest]) largest = j;
    }
    weights[largest] += (int16_t)(ONE - sum); /* the largest weight takes the rest */
    while (count > 1 && !weights[count - 1]) count--;
    for (int j = count; j < room; j++) weights[j] = 0;
    if (count > filter.count) filter.count = count;
  }
  free(exact);
  filter.count += filter.count & 1;
  return filter;
}

static void free_filter(struct filter *filter) {
  free(filter->first);
  free(filter->weights);
}

#if FAST
static inline __m128i pair_of(const int16_t *weights) {
  int32_t pair;
  memcpy(&pair, weights, sizeof pair);
  return _mm_set1_epi32(pair);
}
#endif

/* Writes out[i] = sum of weights[j] * pixels[j * stride + i] over j < count, for i < length. */
static inline __attribute__((always_inline)) void weighted_rows(
    const uint8_t *pixels, int64_t stride, int count, const int16_t *weights, int64_t length,
    int16_t *out) {
  const int shift = WEIGHT_BITS - ROW_BITS;
  int64_t i = 0;
#if FAST
  const __m128i zero = _mm_setzero_si128(), half = _mm_set1_epi32(1 << (shift - 1));
  for (; i + LANES <= length; i += LANES) {
    __m128i sums[4] = {half, half, half, half};
    for (int j = 0; j < count; j += 2) {
      const uint8_t *row = pixels + j * stride + i;
      /* An odd last row is read twice; the second weight is 0. */
      const uint8_t *next = j + 1 < count ? row + stride : row;
      __m128i a = _mm_loadu_si128((const __m128i *)row);
      __m128i b = _mm_loadu_si128((const __m128i *)next);
      __m128i low = _mm_unpacklo_epi8(a, b), high = _mm_unpackhi_epi8(a, b);
      __m128i pair = pair_of(weights + j);
      sums[0] = _mm_add_epi32(sums[0], _mm_madd_epi16(_mm_unpacklo_epi8(low, zero), pair));
      sums[1] = _mm_add_epi32(sums[1], _mm_madd_epi16(_mm_unpackhi_epi8(low, zero), pair));
      sums[2] = _mm_add_epi32(sums[2], _mm_madd_epi16(_mm_unpacklo_epi8(high, zero), pair));
      sums[3] = _mm_add_epi32(sums[3], _mm_madd_epi16(_mm_unpackhi_epi8(high, zero), pair));
    }
    for (int part = 0; part < 4; part++) sums[part] = _mm_srai_epi32(sums[part], shift);
    _mm_storeu_si128((__m128i *)(out + i), _mm_packs_epi32(sums[0], sums[1]));
    _mm_storeu_si128((__m128i *)(out + i + 8), _mm_packs_epi32(sums[2], sums[3]));
  }
#endif
  for (; i < length; i++) {
    int32_t sum = 1 << (shift - 1);
    for (int j = 0; j < count; j++) sum += weights[j] * pixels[j * stride + i];
    out[i] = (int16_t)(sum >> shift);
  }
}

#if FAST
/* The horizontal pass for up to 4 channels; reads up to 4 values past the row's last weight. */
static inline __attribute__((always_inline)) void fast_columns(
    const int16_t *row, const struct filter *filter, int count, int channels, uint8_t *out) {
  const __m128i half = _mm_set1_epi32(1 << (WEIGHT_BITS + ROW_BITS - 1));
  for (int k = 0; k < filter->outputs; k++, out += channels) {
    const int16_t *values = row + (int64_t)filter->first[k] * channels;
    const int16_t *weights = filter->weights + (int64_t)k * filter->room;
    __m128i sum = half;
    for (int j = 0; j < count; j += 2, values += 2 * channels) {
      __m128i a = _mm_loadl_epi64((const __m128i *)values);
      __m128i b = _mm_loadl_epi64((const __m128i *)(values + channels));
      sum = _mm_add_epi32(sum, _mm_madd_epi16(_mm_unpacklo_epi16(a, b), pair_of(weights + j)));
    }
    sum = _mm_srai_epi32(sum, WEIGHT_BITS + ROW_BITS);
    sum = _mm_packs_epi32(sum, sum);
    int32_t pixel = _mm_cvtsi128_si32(_mm_packus_epi16(sum, sum));
    if ((filter->outputs - k) * channels >= 4) {
      memcpy(out, &pixel, 4); /* the next pixels replace what is too much */
    } else {
      memcpy(out, &pixel, channels);
    }
  }
}
#endif

/* Writes the output's row: the sums of weights * row[first + j], for each channel. */
static void weighted_columns(
    const int16_t *row, const struct filter *filter, int channels, uint8_t *out) {
#if FAST
  /* Constants let the compiler unroll the loops. */
  if (channels == 3 && filter->count == 2) return fast_columns(row, filter, 2, 3, out);
  if (channels == 3 && filter->count == 4) return fast_columns(row, filter, 4, 3, out);
  if (channels == 3 && filter->count == 6) return fast_columns(row, filter, 6, 3, out);
  if (channels == 3) return fast_columns(row, filter, filter->count, 3, out);
  if (channels == 1) return fast_columns(row, filter, filter->count, 1, out);
  if (channels == 4) return fast_columns(row, filter, filter->count, 4, out);
#endif
  for (int k = 0; k < filter->outputs; k++) {
    const int16_t *values = row + (int64_t)filter->first[k] * channels;
    const int16_t *weights = filter->weights + (int64_t)k * filter->room;
    for (int channel = 0; channel < channels; channel++) {
      int32_t sum = 1 << (WEIGHT_BITS + ROW_BITS - 1);
      for (int j = 0; j < filter->count; j++) sum += weights[j] * values[j * channels + channel];
      *out++ = (uint8_t)(sum >> (WEIGHT_BITS + ROW_BITS));
    }
  }
}

/* Resizes as `dalijax_resize_window` does, in double, for large scales. */
static void resize_exactly(
    const uint8_t *pixels, int64_t width, int channels, const struct axis *down,
    const struct axis *across, uint8_t *out) {
  double *weights = allocated(sizeof(double) * down->room);
  double *columns = allocated(sizeof(double) * across->outputs * across->room);
  double *row = allocated(sizeof(double) * width * channels);
  int *first = allocated(sizeof(int) * across->outputs);
  int *counts = allocated(sizeof(int) * across->outputs);
  for (int k = 0; k < across->outputs; k++)
    counts[k] = weights_of(across, k, columns + (int64_t)k * across->room, first + k);
  for (int y = 0; y < down->outputs; y++) {
    int top, count = weights_of(down, y, weights, &top);
    for (int64_t i = 0; i < width * channels; i++) row[i] = 0;
    for (int j = 0; j < count; j++) {
      const uint8_t *values = pixels + (top + j) * width * channels;
      for (int64_t i = 0; i < width * channels; i++) row[i] += weights[j] * values[i];
    }
    for (int x = 0; x < across->outputs; x++) {
      const double *column = columns + (int64_t)x * across->room;
      for (int channel = 0; channel < channels; channel++) {
        const double *values = row + (int64_t)first[x] * channels + channel;
        double sum = 0.5;
        for (int j = 0; j < counts[x]; j++) sum += column[j] * values[(int64_t)j * channels];
        *out++ = (uint8_t)(sum < 255 ? sum : 255);
      }
    }
  }
  free(weights);
  free(columns);
  free(row);
  free(first);
  free(counts);
}

/* Resizes a window of a part of an image.
 *
 * pixels: The part, [height, width, channels], whose first pixel is (top, left) of the image.
 * start, end: The corners (y, x) of the window in the image; an end before its start flips.
 * out: [out_height, out_width, channels].
 */
void dalijax_resize_window(
    const uint8_t *pixels, int height, int width, int channels, int top, int left,
    const float *start, const float *end, int out_height, int out_width, uint8_t *out) {
  if (height < 1 || width < 1 || channels < 1 || out_height < 1 || out_width < 1) return;
  const struct axis vertical = axis_of(start[0], end[0], out_height, top, top + height);
  const struct axis horizontal = axis_of(start[1], end[1], out_width, left, left + width);
  if (vertical.support > LARGE || horizontal.support > LARGE) {
    resize_exactly(pixels, width, channels, &vertical, &horizontal, out);
    return;
  }
  struct filter down = filter_of(&vertical), across = filter_of(&horizontal);
  int low = width, high = 0; /* the columns that have weights */
  for (int k = 0; k < out_width; k++) {
    int32_t first = across.first[k];
    if (first < low) low = first;
    if (first + across.count > high) high = first + across.count;
  }
  if (high > width) high = width;
  for (int k = 0; k < out_width; k++) across.first[k] -= low;
  int64_t length = (int64_t)(high - low) * channels, stride = (int64_t)width * channels;
  /* Weights that are 0 read past the last column. */
  int64_t past = ((int64_t)across.count + 1) * channels + 4;
  int16_t *row = allocated(sizeof(int16_t) * (length + past));
  memset(row + length, 0, sizeof(int16_t) * past);
  for (int k = 0; k < out_height; k++) {
    const int16_t *weights = down.weights + (int64_t)k * down.room;
    int count = down.count;
    while (count > 1 && !weights[count - 1]) count--; /* so that no row below the image is read */
    const uint8_t *first = pixels + down.first[k] * stride + (int64_t)low * channels;
    /* Constants let the compiler unroll the loop. */
    if (count <= 2) {
      if (count == 1) weighted_rows(first, stride, 1, weights, length, row);
      else weighted_rows(first, stride, 2, weights, length, row);
    } else if (count == 3) {
      weighted_rows(first, stride, 3, weights, length, row);
    } else if (count == 4) {
      weighted_rows(first, stride, 4, weights, length, row);
    } else {
      weighted_rows(first, stride, count, weights, length, row);
    }
    weighted_columns(row, &across, channels, out + (int64_t)k * out_width * channels);
  }
  free(row);
  free_filter(&down);
  free_filter(&across);
}

/* Functions for DALI's operator NumbaFuncImpl (dali/operators/numba_function/numba_func.cc). Those
 * that end in _shapes receive the shapes of all samples, input by input. */

/* Inputs: images [H, W, C]; an array [height, width, 0] of the output's size; and, unless the window
 * is the whole image, its start and end, float32 [2]; and, if the images are parts, the first row and
 * column (top, left) of the part, int32 [2]. */
void dalijax_resize_1_shapes(
    int64_t **outs, const void *out_ndims, int32_t n_out, int64_t **ins, const void *in_ndims,
    int32_t n_in, int32_t samples) {
  for (int i = 0; i < samples; i++) {
    memcpy(outs[i], ins[samples + i], 2 * sizeof(int64_t));
    outs[i][2] = ins[i][2];
  }
}

void dalijax_resize_1(
    void **outs, int64_t **out_shapes, const void *out_ndims, int32_t n_out, void **ins,
    int64_t **in_shapes, const void *in_ndims, int32_t n_in) {
  const int64_t *shape = in_shapes[0], *size = in_shapes[1];
  const float origin[2] = {0, 0}, whole[2] = {(float)shape[0], (float)shape[1]};
  const int32_t *part = n_in > 4 ? ins[4] : 0;
  dalijax_resize_window(
      ins[0], (int)shape[0], (int)shape[1], (int)shape[2], part ? part[0] : 0, part ? part[1] : 0,
      n_in > 3 ? ins[2] : origin, n_in > 3 ? ins[3] : whole, (int)size[0], (int)size[1], outs[0]);
}

/* Inputs: images [H, W, C]; a table of numbers of 2 bytes, or of 4, [C, 256] or [1, 256]. */
void dalijax_table_1_shapes(
    int64_t **outs, const void *out_ndims, int32_t n_out, int64_t **ins, const void *in_ndims,
    int32_t n_in, int32_t samples) {
  for (int i = 0; i < samples; i++) memcpy(outs[i], ins[i], 3 * sizeof(int64_t));
}

#define CONVERT(type)                                                                             \
  do {                                                                                            \
    const type *table = ins[1];                                                                   \
    type *out = outs[0];                                                                          \
    const int64_t step = in_shapes[1][0] == 1 ? 0 : 256; /* between the tables of channels */     \
    if (channels == 3) {                                                                          \
      for (int64_t i = 0; i < count; i++, pixels += 3, out += 3) {                                \
        out[0] = table[pixels[0]];                                                                \
        out[1] = table[step + pixels[1]];                                                         \
        out[2] = table[2 * step + pixels[2]];                                                     \
      }                                                                                           \
    } else {                                                                                      \
      for (int64_t i = 0; i < count; i++)                                                         \
        for (int64_t channel = 0; channel < channels; channel++)                                  \
          *out++ = table[step * channel + *pixels++];                                             \
    }                                                                                             \
  } while (0)

void dalijax_table_1(
    void **outs, int64_t **out_shapes, const void *out_ndims, int32_t n_out, void **ins,
    int64_t **in_shapes, const void *in_ndims, int32_t n_in) {
  const uint8_t *pixels = ins[0];
  int64_t count = in_shapes[0][0] * in_shapes[0][1], channels = in_shapes[0][2];
  CONVERT(uint16_t);
}

void dalijax_table_4_bytes_1(
    void **outs, int64_t **out_shapes, const void *out_ndims, int32_t n_out, void **ins,
    int64_t **in_shapes, const void *in_ndims, int32_t n_in) {
  const uint8_t *pixels = ins[0];
  int64_t count = in_shapes[0][0] * in_shapes[0][1], channels = in_shapes[0][2];
  CONVERT(uint32_t);
}
