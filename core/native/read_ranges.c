/* Reads many byte ranges of local files in one call, which ctypes makes without the GIL.
 *
 * It uses no Python API, so one build serves all versions of Python. `read_ranges.py` calls it.
 * If the arguments change, rename the function: an older build may remain in the source folder.
 */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

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

/* Reads incomplete ranges. Returns 0, or 1 if a signal interrupted it: call it again. */
int dalijax_read_ranges(struct range *ranges, int64_t num_ranges, uint8_t *buffer) {
  int flags = RWF_NOWAIT; /* from the page cache only */
  for (int64_t ahead = 0; ahead < num_ranges + WINDOW; ahead++) {
    struct range *range = ranges + ahead;
    if (ahead < num_ranges && is_incomplete(range)) {
      ssize_t count = flags ? read_on(range, buffer, flags) : 0;
      if (count > 0) range->count += count;
      if (count < 0 && errno != EAGAIN) flags = 0; /* not supported, or an error: see below */
      /* The disk fetches the next ranges at once, instead of each in turn. */
      if (is_incomplete(range)) {
        posix_fadvise((int)range->fd, (off_t)(range->offset + range->count),
                      (off_t)(range->size - range->count), POSIX_FADV_WILLNEED);
      }
    }
    if (ahead < WINDOW) continue;
    range -= WINDOW;
    while (is_incomplete(range)) {
      ssize_t count = read_on(range, buffer, 0);
      if (count < 0 && errno == EINTR) return 1;
      if (count < 0) range->count = -(int64_t)errno;
      if (count <= 0) break; /* an error, or the end of the file */
      range->count += count;
    }
  }
  return 0;
}
