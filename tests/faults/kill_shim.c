/* Between a process and the C library: faults at system calls that change files below one folder.
 *
 *     LD_PRELOAD=kill_shim.so program
 *
 * The program calls kill_shim_arm(folder, number, mode), through ctypes for example. From then on every such call is
 * counted, and at the number-th
 *     mode 1   the process ends with SIGKILL before the call,
 *     mode 2   the same, but a call that writes writes half of its bytes first,
 *     mode 3   this and every later call that writes fails with ENOSPC, until the shim is armed again,
 *     mode 4   this call, and every later one that syncs, fails with EIO, until the shim is armed again.
 * Mode 0 only counts. Linux; a child of a fork goes on with the numbers of its parent.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum mode { COUNT, KILL, TORN, FULL, BROKEN };
enum kind { WRITE = 'w', SIZE = 't', SYNC = 's', NAME = 'n' }; /* of a call: writes, cuts or grows, syncs, changes a folder */

static char folder[PATH_MAX];
static atomic_long count;
static long limit;
static enum mode mode;
static char kinds[1 << 16];

void kill_shim_arm(const char *below, long number, int what) {
    snprintf(folder, sizeof folder, "%s", below);
    limit = number;
    mode = what;
    memset(kinds, 0, sizeof kinds);
    atomic_store(&count, 0);
}

/* One letter per call since the shim was armed: its kind. */
const char *kill_shim_kinds(void) { return kinds; }

static void end_process(void) {
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* Whether an absolute path lies below the folder. */
static int below(const char *path) {
    size_t length = strlen(folder);
    return length > 0 && path != NULL && strncmp(path, folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int below_fd(int fd) {
    char name[64], path[PATH_MAX];
    if (folder[0] == 0)
        return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return below(path);
}

/* Count one call. Returns 0 to go on, 1 to write half and call end_process(), -1 to fail with errno. */
static int enter(enum kind kind) {
    long number = atomic_fetch_add(&count, 1) + 1;
    if (number < (long)sizeof kinds)
        kinds[number - 1] = kind;
    if (mode == COUNT || number < limit)
        return 0;
    if (mode == KILL || (mode == TORN && kind != WRITE)) {
        if (number == limit)
            end_process();
        return 0;
    }
    if (mode == TORN)
        return number == limit;
    if (mode == FULL && (kind == WRITE || kind == SIZE)) {
        errno = ENOSPC;
        return -1;
    }
    if (mode == BROKEN && (number == limit || kind == SYNC)) {
        errno = EIO;
        return -1;
    }
    return 0;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (real == NULL) \
        real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

#define WRAP(name, kind, inside, parameters, arguments) \
    int name parameters { \
        REAL(int, name, PARAMETERS parameters); \
        if ((inside) && enter(kind) < 0) \
            return -1; \
        return real arguments; \
    }
#define PARAMETERS(...) __VA_ARGS__

#define WRAP_WRITE(name, offset_parameter, offset_argument) \
    ssize_t name(int fd, const void *data, size_t size offset_parameter) { \
        REAL(ssize_t, name, int, const void *, size_t offset_parameter); \
        int what = below_fd(fd) ? enter(WRITE) : 0; \
        if (what < 0) \
            return -1; \
        if (what > 0) { \
            real(fd, data, size / 2 offset_argument); \
            end_process(); \
        } \
        return real(fd, data, size offset_argument); \
    }
#define WRAP_WRITEV(name, offset_parameter, offset_argument) \
    ssize_t name(int fd, const struct iovec *pieces, int pieces_count offset_parameter) { \
        REAL(ssize_t, name, int, const struct iovec *, int offset_parameter); \
        int what = below_fd(fd) ? enter(WRITE) : 0; \
        if (what < 0) \
            return -1; \
        if (what > 0) { \
            struct iovec half = {pieces[0].iov_base, pieces[0].iov_len / 2}; \
            real(fd, pieces_count > 1 ? pieces : &half, pieces_count > 1 ? pieces_count / 2 : 1 offset_argument); \
            end_process(); \
        } \
        return real(fd, pieces, pieces_count offset_argument); \
    }
#define COMMA ,

WRAP_WRITE(write, , )
WRAP_WRITE(pwrite, COMMA off_t offset, COMMA offset)
WRAP_WRITE(pwrite64, COMMA off64_t offset, COMMA offset)
WRAP_WRITEV(writev, , )
WRAP_WRITEV(pwritev, COMMA off_t offset, COMMA offset)
WRAP_WRITEV(pwritev64, COMMA off64_t offset, COMMA offset)

WRAP(fsync, SYNC, below_fd(fd), (int fd), (fd))
WRAP(fdatasync, SYNC, below_fd(fd), (int fd), (fd))
WRAP(ftruncate, SIZE, below_fd(fd), (int fd, off_t size), (fd, size))
WRAP(ftruncate64, SIZE, below_fd(fd), (int fd, off64_t size), (fd, size))
WRAP(fallocate, SIZE, below_fd(fd), (int fd, int how, off_t start, off_t size), (fd, how, start, size))
WRAP(rename, NAME, below(to), (const char *from, const char *to), (from, to))
WRAP(renameat, NAME, below(to), (int at, const char *from, int to_at, const char *to), (at, from, to_at, to))
WRAP(link, NAME, below(to), (const char *from, const char *to), (from, to))
WRAP(linkat, NAME, below(to), (int at, const char *from, int to_at, const char *to, int flags), (at, from, to_at, to, flags))
WRAP(unlink, NAME, below(path), (const char *path), (path))
WRAP(unlinkat, NAME, below(path), (int at, const char *path, int flags), (at, path, flags))
WRAP(mkdir, NAME, below(path), (const char *path, mode_t bits), (path, bits))
WRAP(mkdirat, NAME, below(path), (int at, const char *path, mode_t bits), (at, path, bits))
