/* Resizes windows of uint8 images, and converts uint8 images by a table, on the CPU.
 *
 * DALI's operator for compiled functions calls `dalijax_resize_1`, `dalijax_table_2` and
 * `dalijax_resize_table_1` in its threads; `cpu_pixels.py` adds it to graphs. If pixels or arguments
 * change, increase the numbers in their names: an older build may remain in the source folder. If
 * pixels change, increase that in states, too.
 *
 * The filter is a triangle, as that of DALI's and Pillow's linear interpolation: its support is
 * larger than one pixel if the image becomes smaller (antialiasing). The window's coordinates are
 * those of pixel edges. Positions outside of the image have the value of the nearest pixel.
 *
 * Weights are computed by the basic operations in double, which IEEE 754 defines exactly (compile
 * with -ffp-contract=off), and pixels in whole numbers. So all x86-64 processors and compilers
 * compute the same pixels. Functions with SSE2, and with AVX2 if the processor has it, save time.
 * Without SSE2, the code is slow; see `dalijax_resize_is_fast`.
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
#if FAST && defined(__GNUC__) && !defined(DALIJAX_SSE2)
#include <cpuid.h>
#include <immintrin.h>
#define WIDE __attribute__((target("avx2,f16c")))
#endif

const int32_t dalijax_resize_is_fast = FAST;

enum {
  WEIGHT_BITS = 14, /* of the fraction of a weight */
  ONE = 1 << WEIGHT_BITS,
  ROW_BITS = 7, /* of the fraction of a value between the two passes: 255 << 7 fits into int16 */
  LANES = 16,   /* values that one step of the vertical pass computes */
  WIDE_LANES = 32, /* the same with AVX2 */
  MOST = 4, /* channels that functions with AVX2 take */
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

#ifdef WIDE
static int is_wide; /* whether the processor has AVX2 and F16C */

/* CPUID takes long in virtual machines, so it is not called for each image. */
__attribute__((constructor)) static void check_processor(void) {
  unsigned a, b, c, d;
  __builtin_cpu_init();
  /* Not all compilers know "f16c". */
  is_wide = __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* As `weighted_rows`, for length >= WIDE_LANES. */
WIDE static inline __attribute__((always_inline)) void wide_rows_of(
    const uint8_t *pixels, int64_t stride, int count, const int16_t *weights, int64_t length,
    int16_t *out) {
  const int shift = WEIGHT_BITS - ROW_BITS;
  const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << (shift - 1));
  for (int64_t i = 0; i < length; i += WIDE_LANES) {
    if (i > length - WIDE_LANES) i = length - WIDE_LANES; /* computes some values again */
    __m256i sums[4] = {half, half, half, half};
    for (int j = 0; j < count; j += 2) {
      const uint8_t *row = pixels + j * stride + i;
      const uint8_t *next = j + 1 < count ? row + stride : row;
      __m256i a = _mm256_loadu_si256((const __m256i *)row);
      __m256i b = _mm256_loadu_si256((const __m256i *)next);
      __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
      __m256i pair = _mm256_broadcastd_epi32(pair_of(weights + j));
      __m256i part_0 = _mm256_madd_epi16(_mm256_unpacklo_epi8(low, zero), pair);
      __m256i part_1 = _mm256_madd_epi16(_mm256_unpackhi_epi8(low, zero), pair);
      __m256i part_2 = _mm256_madd_epi16(_mm256_unpacklo_epi8(high, zero), pair);
      __m256i part_3 = _mm256_madd_epi16(_mm256_unpackhi_epi8(high, zero), pair);
      sums[0] = _mm256_add_epi32(sums[0], part_0);
      sums[1] = _mm256_add_epi32(sums[1], part_1);
      sums[2] = _mm256_add_epi32(sums[2], part_2);
      sums[3] = _mm256_add_epi32(sums[3], part_3);
    }
    for (int part = 0; part < 4; part++) sums[part] = _mm256_srai_epi32(sums[part], shift);
    /* Each half of the registers was computed by itself. */
    __m256i low = _mm256_packs_epi32(sums[0], sums[1]), high = _mm256_packs_epi32(sums[2], sums[3]);
    __m256i *to = (__m256i *)(out + i);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(low, high, 0x31));
  }
}

WIDE static void wide_rows(
    const uint8_t *pixels, int64_t stride, int count, const int16_t *weights, int64_t length,
    int16_t *out) {
  if (count == 2) wide_rows_of(pixels, stride, 2, weights, length, out);
  else if (count == 3) wide_rows_of(pixels, stride, 3, weights, length, out);
  else if (count == 4) wide_rows_of(pixels, stride, 4, weights, length, out);
  else wide_rows_of(pixels, stride, count, weights, length, out);
}

/* Stores 4 pixels where `room` bytes may be written. */
static inline __attribute__((always_inline)) void store_pixels(
    __m128i pixels, uint8_t *out, int channels, int room) {
  if (room >= 16) {
    _mm_storeu_si128((__m128i *)out, pixels); /* the next pixels replace what is too much */
  } else {
    memcpy(out, &pixels, 4 * channels);
  }
}

/* The horizontal pass for two rows at once, each in a half of the registers, of at least 4 pixels
 * of up to 4 channels; reads up to 6 values past the row's last weight. */
WIDE static inline __attribute__((always_inline)) void wide_columns_of(
    const int16_t *first_row, const int16_t *second_row, const struct filter *filter, int count,
    int channels, uint8_t *first_out, uint8_t *second_out) {
  const __m256i half = _mm256_set1_epi32(1 << (WEIGHT_BITS + ROW_BITS - 1));
  int8_t pairs[16], bytes[16]; /* which bytes become those of pairs of values, and of pixels */
  for (int i = 0; i < 16; i++) {
    int channel = i / 4;
    pairs[i] = channel < channels ? 2 * (channel + i % 4 / 2 * channels) + i % 2 : -1;
    bytes[i] = i < 4 * channels ? i / channels * 4 + i % channels : -1;
  }
  const __m256i to_pairs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)pairs));
  const __m256i to_bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
  for (int k = 0; k < filter->outputs; k += 4) {
    if (k > filter->outputs - 4) k = filter->outputs - 4; /* computes some pixels again */
    __m256i sums[4];
    for (int pixel = 0; pixel < 4; pixel++) {
      const int64_t first = (int64_t)filter->first[k + pixel] * channels;
      const int16_t *weights = filter->weights + (int64_t)(k + pixel) * filter->room;
      __m256i sum = half;
      for (int j = 0; j < count; j += 2) {
        const __m128i *a = (const __m128i *)(first_row + first + j * channels);
        const __m128i *b = (const __m128i *)(second_row + first + j * channels);
        __m256i values = _mm256_castsi128_si256(_mm_loadu_si128(a));
        values = _mm256_inserti128_si256(values, _mm_loadu_si128(b), 1);
        __m256i pair = _mm256_broadcastd_epi32(pair_of(weights + j));
        values = _mm256_shuffle_epi8(values, to_pairs);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(values, pair));
      }
      sums[pixel] = _mm256_srai_epi32(sum, WEIGHT_BITS + ROW_BITS);
    }
    __m256i low = _mm256_packs_epi32(sums[0], sums[1]), high = _mm256_packs_epi32(sums[2], sums[3]);
    __m256i pixels = _mm256_shuffle_epi8(_mm256_packus_epi16(low, high), to_bytes);
    int room = (filter->outputs - k) * channels;
    store_pixels(_mm256_castsi256_si128(pixels), first_out + k * channels, channels, room);
    store_pixels(_mm256_extracti128_si256(pixels, 1), second_out + k * channels, channels, room);
  }
}

WIDE static void wide_columns(
    const int16_t *first_row, const int16_t *second_row, const struct filter *filter, int channels,
    uint8_t *first_out, uint8_t *second_out) {
#define COLUMNS(count, channels) \
  wide_columns_of(first_row, second_row, filter, count, channels, first_out, second_out)
  if (channels == 3 && filter->count == 2) COLUMNS(2, 3);
  else if (channels == 3 && filter->count == 4) COLUMNS(4, 3);
  else if (channels == 3) COLUMNS(filter->count, 3);
  else COLUMNS(filter->count, channels);
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
  int64_t past = ((int64_t)across.count + 1) * channels + 8;
#ifdef WIDE
  int wide = channels <= MOST && out_width >= 4 && length >= WIDE_LANES && is_wide;
#endif
  int16_t *rows[2];
  for (int k = 0; k < 2; k++) {
    rows[k] = allocated(sizeof(int16_t) * (length + past));
    memset(rows[k] + length, 0, sizeof(int16_t) * past);
  }
  for (int k = 0; k < out_height; k++) {
    const int16_t *weights = down.weights + (int64_t)k * down.room;
    int count = down.count;
    while (count > 1 && !weights[count - 1]) count--; /* so that no row below the image is read */
    const uint8_t *first = pixels + down.first[k] * stride + (int64_t)low * channels;
    int16_t *row = rows[k % 2];
    uint8_t *to = out + (int64_t)k * out_width * channels;
#ifdef WIDE
    if (wide) {
      wide_rows(first, stride, count, weights, length, row);
      if (k % 2) wide_columns(rows[0], row, &across, channels, to - out_width * channels, to);
      else if (k + 1 == out_height) wide_columns(row, row, &across, channels, to, to);
      continue;
    }
#endif
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
    weighted_columns(row, &across, channels, to);
  }
  free(rows[0]);
  free(rows[1]);
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

/* Inputs: images [H, W, C]; and a table of numbers of 2 bytes, or of 4, [C, 256] or [1, 256]. The
 * last axis continues with two float32, the mean and the inverse of the deviation: the numbers may
 * be (level - mean) * inverse in float16, bfloat16 or float32. */
void dalijax_table_2_shapes(
    int64_t **outs, const void *out_ndims, int32_t n_out, int64_t **ins, const void *in_ndims,
    int32_t n_in, int32_t samples) {
  for (int i = 0; i < samples; i++) memcpy(outs[i], ins[i], 3 * sizeof(int64_t));
}

enum { FLOAT16, BFLOAT16, FLOAT32 };

#ifdef WIDE
/* Writes (pixel - mean) * inverse for the first values of images; returns their number.
 * means, inverses: those of each channel. */
WIDE static inline __attribute__((always_inline)) int64_t normalize_as(
    int kind, const uint8_t *pixels, int64_t length, int channels, const float *means,
    const float *inverses, void *out) {
  float mean[8 * MOST], inverse[8 * MOST];
  for (int i = 0; i < 8 * channels; i++) {
    mean[i] = means[i % channels];
    inverse[i] = inverses[i % channels];
  }
  int64_t i = 0;
  while (i + 8 * channels <= length) {
    for (int k = 0; k < 8 * channels; k += 8, i += 8) {
      __m256i levels = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(pixels + i)));
      __m256 x = _mm256_sub_ps(_mm256_cvtepi32_ps(levels), _mm256_loadu_ps(mean + k));
      x = _mm256_mul_ps(x, _mm256_loadu_ps(inverse + k));
      if (kind == FLOAT32) {
        _mm256_storeu_ps((float *)out + i, x);
      } else if (kind == FLOAT16) {
        __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)((uint16_t *)out + i), halves);
      } else {
        /* The upper 16 bits, rounded to the nearest, and to the even if two are. */
        __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
        __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi32(1));
        bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        bits = _mm256_srli_epi32(bits, 16);
        __m128i halves = _mm_packus_epi32(
            _mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
        _mm_storeu_si128((__m128i *)((uint16_t *)out + i), halves);
      }
    }
  }
  return i;
}

WIDE static int64_t normalize(
    int kind, const uint8_t *pixels, int64_t length, int channels, const float *means,
    const float *inverses, void *out) {
  if (kind == FLOAT32)
    return normalize_as(FLOAT32, pixels, length, channels, means, inverses, out);
  if (kind == FLOAT16)
    return normalize_as(FLOAT16, pixels, length, channels, means, inverses, out);
  return normalize_as(BFLOAT16, pixels, length, channels, means, inverses, out);
}
#endif

/* Converts the first values of images without the table, if its numbers are equal to those of
 * `normalize`; returns how many values.
 * shape: The shape of the table. */
static int64_t without_table(
    int kind, const uint8_t *pixels, int64_t length, int64_t channels, const uint8_t *table,
    const int64_t *shape, void *out) {
#ifdef WIDE
  if (!is_wide || channels < 1 || channels > MOST) return 0;
  const int64_t size = 256 * (kind == FLOAT32 ? 4 : 2); /* of the numbers of a channel, in bytes */
  float means[MOST], inverses[MOST];
  uint8_t levels[256];
  uint32_t numbers[256];
  for (int i = 0; i < 256; i++) levels[i] = (uint8_t)i;
  for (int channel = 0; channel < channels; channel++) {
    memcpy(means + channel, table + size, 4);
    memcpy(inverses + channel, table + size + 4, 4);
    normalize(kind, levels, 256, 1, means + channel, inverses + channel, numbers);
    if (memcmp(numbers, table, size)) return 0;
    if (shape[0] > 1) table += size + 8;
  }
  return normalize(kind, pixels, length, (int)channels, means, inverses, out);
#else
  return 0;
#endif
}

#define LOOK_UP(type)                                                                             \
  do {                                                                                            \
    const type *numbers = table;                                                                  \
    type *to = (type *)out + done;                                                                \
    const int64_t step = shape[0] == 1 ? 0 : shape[1]; /* between channels */                     \
    pixels += done;                                                                               \
    if (channels == 3) {                                                                          \
      for (int64_t i = done; i < length; i += 3, pixels += 3, to += 3) {                          \
        to[0] = numbers[pixels[0]];                                                               \
        to[1] = numbers[step + pixels[1]];                                                        \
        to[2] = numbers[2 * step + pixels[2]];                                                    \
      }                                                                                           \
    } else {                                                                                      \
      for (int64_t i = done; i < length; i += channels)                                           \
        for (int64_t channel = 0; channel < channels; channel++)                                  \
          *to++ = numbers[step * channel + *pixels++];                                            \
    }                                                                                             \
  } while (0)

static void convert(
    const uint8_t *pixels, int64_t length, int64_t channels, const void *table,
    const int64_t *shape, void *out) {
  if (shape[1] == 256 + 2) { /* of 4 bytes */
    int64_t done = without_table(FLOAT32, pixels, length, channels, table, shape, out);
    LOOK_UP(uint32_t);
  } else {
    int64_t done = without_table(FLOAT16, pixels, length, channels, table, shape, out);
    if (!done) done = without_table(BFLOAT16, pixels, length, channels, table, shape, out);
    LOOK_UP(uint16_t);
  }
}

void dalijax_table_2(
    void **outs, int64_t **out_shapes, const void *out_ndims, int32_t n_out, void **ins,
    int64_t **in_shapes, const void *in_ndims, int32_t n_in) {
  const int64_t *shape = in_shapes[0];
  convert(ins[0], shape[0] * shape[1] * shape[2], shape[2], ins[1], in_shapes[1], outs[0]);
}

/* Both in one operator, in which pixels stay in the cache. Inputs: those of `dalijax_resize_1`, and
 * the table of `dalijax_table_2`. */
void dalijax_resize_table_1(
    void **outs, int64_t **out_shapes, const void *out_ndims, int32_t n_out, void **ins,
    int64_t **in_shapes, const void *in_ndims, int32_t n_in) {
  const int64_t channels = in_shapes[0][2], *size = in_shapes[1];
  const int64_t length = size[0] * size[1] * channels;
  void *pixels = allocated(length);
  dalijax_resize_1(&pixels, out_shapes, out_ndims, n_out, ins, in_shapes, in_ndims, n_in - 1);
  convert(pixels, length, channels, ins[n_in - 1], in_shapes[n_in - 1], outs[0]);
  free(pixels);
}
