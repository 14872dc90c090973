/* Replaces calls of the kernel in read_ranges.c by functions of a test; see local_reads.py. */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <sys/uio.h>

/* Return the number of bytes, or -errno; -EINTR also sends SIGINT. */
int64_t (*kernel_read)(int fd, void *to, int64_t size, int64_t offset, int flags);
void (*kernel_advise)(int fd, int64_t offset, int64_t size);

static ssize_t simulated_preadv2(int fd, const struct iovec *part, int parts, off_t offset,
                                 int flags) {
  (void)parts;
  int64_t count = kernel_read(fd, part->iov_base, (int64_t)part->iov_len, offset, flags);
  if (count == -EINTR) raise(SIGINT);
  if (count >= 0) return (ssize_t)count;
  errno = (int)-count;
  return -1;
}

static int simulated_fadvise(int fd, off_t offset, off_t size, int advice) {
  (void)advice;
  kernel_advise(fd, offset, size);
  return 0;
}

#define preadv2 simulated_preadv2
#define posix_fadvise simulated_fadvise
