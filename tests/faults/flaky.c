/* Makes calls on the files below one directory fail as a failing disk, mount or network does.

   Loaded before libc (LD_PRELOAD), so that it also reaches what TensorStore does in C++. Without a
   directory to fail in, it passes everything on. Python configures it through ctypes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char directory[PATH_MAX];
static uint64_t seed;
static int one_in, burst, errors[8], error_count;
static atomic_long calls, failing, room;

/* Fail one call in `one_in_` (0: none), and the `burst_ - 1` calls after it; with `room_` >= 0, have
   no space left once so many bytes are written. An empty directory ends it. */
void flaky_configure(const char *directory_, uint64_t seed_, int one_in_, int burst_, long room_,
                     const int *errors_, int error_count_) {
  directory[0] = 0;
  if (!*directory_) return;
  seed = seed_, one_in = one_in_, burst = burst_, error_count = error_count_;
  memcpy(errors, errors_, sizeof(int) * error_count_);
  calls = failing = 0;
  room = room_;
  strncpy(directory, directory_, sizeof directory - 1);
}

static uint64_t mixed(uint64_t x) { /* splitmix64 */
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

static int fails_at(const char *path) {
  size_t length = strlen(directory);
  if (!length || !path || strncmp(path, directory, length)) return 0;
  uint64_t drawn = mixed(seed ^ mixed(atomic_fetch_add(&calls, 1)));
  if (one_in && drawn % one_in == 0) failing = burst;
  if (atomic_fetch_sub(&failing, 1) <= 0) {
    failing = 0;
    return 0;
  }
  errno = errors[(drawn >> 32) % error_count];
  return 1;
}

static const char *path_of(int file, char *buffer) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, buffer, PATH_MAX - 1);
  buffer[length < 0 ? 0 : length] = 0;
  return buffer;
}

static int fails(int file) {
  char buffer[PATH_MAX];
  return directory[0] && fails_at(path_of(file, buffer));
}

static int is_full(int file, size_t bytes) {
  char buffer[PATH_MAX];
  if (!directory[0] || room < 0) return 0;
  if (strncmp(path_of(file, buffer), directory, strlen(directory))) return 0;
  if (atomic_fetch_sub(&room, (long)bytes) >= (long)bytes) return 0;
  room = 0;
  errno = ENOSPC;
  return 1;
}

#define NEXT(name) \
  static __typeof__(name) *next; \
  if (!next) next = dlsym(RTLD_NEXT, #name)

#define MODE(flags)       \
  va_list more;           \
  va_start(more, flags);  \
  mode_t mode = va_arg(more, mode_t); \
  va_end(more)

#define OPEN(name)                                \
  int name(const char *path, int flags, ...) {    \
    NEXT(name);                                   \
    MODE(flags);                                  \
    return fails_at(path) ? -1 : next(path, flags, mode); \
  }

#define OPEN_AT(name)                                  \
  int name(int at, const char *path, int flags, ...) { \
    NEXT(name);                                        \
    MODE(flags);                                       \
    return fails_at(path) ? -1 : next(at, path, flags, mode); \
  }

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)

ssize_t read(int file, void *to, size_t bytes) {
  NEXT(read);
  return fails(file) ? -1 : next(file, to, bytes);
}
ssize_t pread(int file, void *to, size_t bytes, off_t at) {
  NEXT(pread);
  return fails(file) ? -1 : next(file, to, bytes, at);
}
ssize_t pread64(int file, void *to, size_t bytes, off64_t at) {
  NEXT(pread64);
  return fails(file) ? -1 : next(file, to, bytes, at);
}
ssize_t write(int file, const void *from, size_t bytes) {
  NEXT(write);
  return fails(file) || is_full(file, bytes) ? -1 : next(file, from, bytes);
}
ssize_t pwrite(int file, const void *from, size_t bytes, off_t at) {
  NEXT(pwrite);
  return fails(file) || is_full(file, bytes) ? -1 : next(file, from, bytes, at);
}
ssize_t pwrite64(int file, const void *from, size_t bytes, off64_t at) {
  NEXT(pwrite64);
  return fails(file) || is_full(file, bytes) ? -1 : next(file, from, bytes, at);
}
ssize_t writev(int file, const struct iovec *from, int count) {
  NEXT(writev);
  size_t bytes = 0;
  for (int i = 0; i < count; ++i) bytes += from[i].iov_len;
  return fails(file) || is_full(file, bytes) ? -1 : next(file, from, count);
}
int fsync(int file) {
  NEXT(fsync);
  return fails(file) ? -1 : next(file);
}
int fdatasync(int file) {
  NEXT(fdatasync);
  return fails(file) ? -1 : next(file);
}
int rename(const char *from, const char *to) {
  NEXT(rename);
  return fails_at(from) ? -1 : next(from, to);
}
int mkdir(const char *path, mode_t mode) {
  NEXT(mkdir);
  return fails_at(path) ? -1 : next(path, mode);
}
