/* A layer between a process and the files under one folder, loaded with LD_PRELOAD: the operation of a given number fails, is cut short, or
 * ends the process. Operations are what changes files: open for writing, write, allocate, truncate, sync and rename. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

enum { NONE, ERROR, SHORT, KILL, KILL_SHORT };

static char folder[PATH_MAX];
static int kind, number, lasting;
static long at, count;

/* From now on, operation `first` (from 0) on files under `under` meets the fault: `what` of the enumeration; `error`: an errno, or a signal;
 * `stays`: so do all later ones that need space. Returns nothing. */
void faulty_files(const char* under, int what, int error, long first, int stays) {
  snprintf(folder, sizeof folder, "%s", under);
  kind = what, number = error, at = first, lasting = stays, count = 0;
}

long faulty_files_count(void) { return count; }

static int is_under(const char* path) {
  char whole[PATH_MAX];
  if (!folder[0]) return 0;
  if (path[0] != '/') {
    char here[PATH_MAX / 2];
    if (!getcwd(here, sizeof here)) return 0;
    snprintf(whole, sizeof whole, "%s/%.2000s", here, path);
    path = whole;
  }
  return strncmp(path, folder, strlen(folder)) == 0;
}

static int is_open_under(int descriptor) {
  char link[64], path[PATH_MAX];
  if (!folder[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return is_under(path);
}

/* What is to happen to the present operation; `space`: whether it needs some. Only writes can be cut short, and are counted for that. */
static int fault(int space, int writes) {
  if (!writes && (kind == SHORT || kind == KILL_SHORT)) return NONE;
  const long now = count++;
  if (now != at && !(lasting && space && now > at)) return NONE;
  if (kind == KILL) kill(getpid(), number);
  return kind;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int opened(int (*next)(int, const char*, int, ...), int base, const char* path, int flags, mode_t mode) {
  if ((flags & O_ACCMODE) != O_RDONLY && is_under(path) && fault(flags & O_CREAT, 0) == ERROR) {
    errno = number;
    return -1;
  }
  return next(base, path, flags, mode);
}

#define OPEN(name)                                            \
  int name(const char* path, int flags, ...) {                \
    va_list rest;                                             \
    va_start(rest, flags);                                    \
    const mode_t mode = va_arg(rest, mode_t);                 \
    va_end(rest);                                             \
    return opened(NEXT(openat), AT_FDCWD, path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                     \
  int name(int base, const char* path, int flags, ...) { \
    va_list rest;                                        \
    va_start(rest, flags);                               \
    const mode_t mode = va_arg(rest, mode_t);            \
    va_end(rest);                                        \
    return opened(NEXT(name), base, path, flags, mode);  \
  }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int descriptor, const void* bytes, size_t size) {
  const int met = is_open_under(descriptor) ? fault(1, 1) : NONE;
  if (met == ERROR) {
    errno = number;
    return -1;
  }
  const ssize_t done = NEXT(write)(descriptor, bytes, (met == SHORT || met == KILL_SHORT) && size > 1 ? size / 2 : size);
  if (met == KILL_SHORT) kill(getpid(), number);
  return done;
}

#define FAILING(space, descriptor)                             \
  if (is_open_under(descriptor) && fault(space, 0) == ERROR) { \
    errno = number;                                            \
    return -1;                                                 \
  }

int fsync(int descriptor) {
  FAILING(0, descriptor)
  return NEXT(fsync)(descriptor);
}

int ftruncate64(int descriptor, off64_t size) {
  FAILING(1, descriptor)
  return NEXT(ftruncate64)(descriptor, size);
}

int fchmod(int descriptor, mode_t mode) {
  FAILING(0, descriptor)
  return NEXT(fchmod)(descriptor, mode);
}

int posix_fallocate64(int descriptor, off64_t begin, off64_t size) {
  if (is_open_under(descriptor) && fault(1, 0) == ERROR) return number;
  return NEXT(posix_fallocate64)(descriptor, begin, size);
}

int rename(const char* from, const char* to) {
  if (is_under(to) && fault(0, 0) == ERROR) {
    errno = number;
    return -1;
  }
  return NEXT(rename)(from, to);
}

int mkdir(const char* path, mode_t mode) {
  if (is_under(path) && fault(1, 0) == ERROR) {
    errno = number;
    return -1;
  }
  return NEXT(mkdir)(path, mode);
}
