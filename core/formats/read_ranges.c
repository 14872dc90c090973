/* Reads many byte ranges of local files in one call, which ctypes makes without the GIL, and
 * computes checksums.
 *
 * It uses no Python API, so one build serves all versions of Python. `read_ranges.py` calls it.
 * If the arguments or the checksums change, rename the function: an older build may remain in the
 * source folder.
 */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

struct range {
  int64_t fd;
  int64_t offset; /* in the file */
  int64_t size;
  int64_t start; /* in the buffer */
  int64_t count; /* bytes read so far; -errno if reading failed */
};

static int is_incomplete(const struct range *range) {
  return range->count >= 0 && range->count < range->size;
}

/* Continues to read a range; returns the number of bytes, -1 for an error. */
static ssize_t read_on(const struct range *range, uint8_t *buffer, int flags) {
  struct iovec part = {buffer + range->start + range->count, (size_t)(range->size - range->count)};
  return preadv2((int)range->fd, &part, 1, (off_t)(range->offset + range->count), flags);
}

enum { WINDOW = 64 }; /* ranges that the disk may fetch at the same time */

enum { WORDS = 512, BLOCK = 8 * WORDS }; /* words of 64 bits, in little-endian order */

/* Returns the result of the last step of splitmix64, as `mix` of hashing.py. */
static uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

/* Returns the checksum of a block. As in XXH3, a sum adds the products of the halves of each word
 * after an XOR with a key. A product does not change with a half if the other half is 0, so that
 * another sum adds the words, and changes with every bit. */
static uint64_t block_checksum(const uint8_t *block, const uint64_t *keys) {
#ifdef __SSE2__ /* twice as fast: compilers do not use its multiplication for the loop below */
  __m128i products = _mm_setzero_si128(), words = _mm_setzero_si128();
  for (int i = 0; i < WORDS; i += 2) {
    __m128i pair = _mm_loadu_si128((const __m128i *)(block + 8 * i));
    __m128i mixed = _mm_xor_si128(pair, _mm_loadu_si128((const __m128i *)(keys + i)));
    products = _mm_add_epi64(products, _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32)));
    words = _mm_add_epi64(words, pair);
  }
  uint64_t of_products[2], of_words[2];
  _mm_storeu_si128((__m128i *)of_products, products);
  _mm_storeu_si128((__m128i *)of_words, words);
  return mix((of_products[0] + of_products[1]) ^ mix(of_words[0] + of_words[1]));
#else
  uint64_t products = 0, words = 0;
  for (int i = 0; i < WORDS; i++) {
    uint64_t word, mixed;
    memcpy(&word, block + 8 * i, 8);
    mixed = word ^ keys[i];
    products += (mixed & 0xffffffff) * (mixed >> 32);
    words += word;
  }
  return mix(products ^ mix(words));
#endif
}

/* Computes the checksum of a range of bytes; the last block is padded by zeros. */
static uint64_t checksum(const uint8_t *data, int64_t size, const uint64_t *keys) {
  const uint64_t factor = 0x9e3779b97f4a7c15;
  uint64_t sum = (uint64_t)size;
  for (; size >= BLOCK; size -= BLOCK, data += BLOCK) {
    sum = sum * factor + block_checksum(data, keys);
  }
  if (size > 0) {
    uint8_t block[BLOCK] = {0};
    memcpy(block, data, (size_t)size);
    sum = sum * factor + block_checksum(block, keys);
  }
  return sum;
}

/* Reads incomplete ranges. Returns 0, or 1 if a signal interrupted it: call it again.
 *
 * If `sums` is not NULL, it gets the checksum of each range that was read completely. A checksum is
 * computed when the bytes have just been read, and are in the processor's cache.
 */
int dalijax_read(struct range *ranges, int64_t num_ranges, uint8_t *buffer, const uint64_t *keys,
                 uint64_t *sums) {
  int flags = RWF_NOWAIT; /* from the page cache only */
  for (int64_t ahead = 0; ahead < num_ranges + WINDOW; ahead++) {
    struct range *range = ranges + ahead;
    if (ahead < num_ranges && is_incomplete(range)) {
      ssize_t count = flags ? read_on(range, buffer, flags) : 0;
      if (count > 0) range->count += count;
      if (count < 0 && errno != EAGAIN) flags = 0; /* not supported, or an error: see below */
      if (sums && range->count == range->size) {
        sums[ahead] = checksum(buffer + range->start, range->size, keys);
      }
      /* The disk fetches the next ranges at once, instead of each in turn. */
      if (is_incomplete(range)) {
        posix_fadvise((int)range->fd, (off_t)(range->offset + range->count),
                      (off_t)(range->size - range->count), POSIX_FADV_WILLNEED);
      }
    }
    if (ahead < WINDOW) continue;
    range -= WINDOW;
    if (!is_incomplete(range)) continue;
    while (is_incomplete(range)) {
      ssize_t count = read_on(range, buffer, 0);
      if (count < 0 && errno == EINTR) return 1;
      if (count < 0) range->count = -(int64_t)errno;
      if (count <= 0) break; /* an error, or the end of the file */
      range->count += count;
    }
    if (sums && range->count == range->size) {
      sums[ahead - WINDOW] = checksum(buffer + range->start, range->size, keys);
    }
  }
  return 0;
}

/* Computes the checksum of each array into `sums`. */
void dalijax_sum(int64_t num_arrays, const uint8_t *const *arrays, const int64_t *sizes,
                 const uint64_t *keys, uint64_t *sums) {
  for (int64_t k = 0; k < num_arrays; k++) sums[k] = checksum(arrays[k], sizes[k], keys);
}
