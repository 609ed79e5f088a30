/* Counts bytes and time of reads from dataset files, by the marks that opens left on descriptors; also hooks the calls
 * that move or end a mark, change the working directory, or end the process. For other descriptors a hook costs one
 * byte load.
 *
 * A mapping is seen, the pages that are read of it are not; of stdio, only what fread reads is counted.
 */
#include "_native.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

extern ssize_t __read_chk(int, void *, size_t, size_t) WEAK;
extern ssize_t __pread_chk(int, void *, size_t, off_t, size_t) WEAK;
extern ssize_t __pread64_chk(int, void *, size_t, off64_t, size_t) WEAK;
extern size_t __fread_chk(void *, size_t, size_t, size_t, FILE *) WEAK;
extern ssize_t copy_file_range(int, off64_t *, int, off64_t *, size_t, unsigned) WEAK;
extern ssize_t preadv2(int, const struct iovec *, int, off_t, int) WEAK;
extern ssize_t preadv64v2(int, const struct iovec *, int, off64_t, int) WEAK;
extern int close_range(unsigned, unsigned, int) WEAK;
extern void closefrom(int) WEAK;
extern int dup3(int, int, int) WEAK;
#ifndef CLOSE_RANGE_UNSHARE
#define CLOSE_RANGE_UNSHARE 2u
#endif
extern void __longjmp_chk(jmp_buf, int) WEAK __attribute__((noreturn));

/* `at`: where in the file the read began, as it is once the call has returned. */
#define TIMED(fd, at, call) \
    int kind = fd_kind(fd); \
    if (__builtin_expect(kind == FD_OTHER, 1)) \
        return call; \
    kind = moved_kind(fd, kind); \
    uint64_t begin = wait_begin(kind); \
    ssize_t bytes = call; \
    uint64_t ns = wait_end(kind, begin); \
    count_read(fd, kind, bytes, kind == FD_SOURCE ? (at) : -1, ns); \
    return bytes;

/* Reads what has arrived of a file that is on its way. */
#define ARRIVED(fd, call) \
    if (fd_kind(fd) == FD_SOURCE) { \
        ssize_t arrived = call; \
        if (arrived != NOT_ARRIVED) \
            return arrived; \
    }
#define ONE(out, n) (&(struct iovec){out, n}), 1, 1

/* Returns where in the file a read of so many bytes began that moved the descriptor's own position; -1: not known. */
static off_t moved_from(int fd, ssize_t bytes) {
    int saved = errno;
    off_t end = bytes > 0 ? lseek(fd, 0, SEEK_CUR) : -1;
    errno = saved;
    return end < 0 ? -1 : end - bytes;
}

static off_t began_at(int fd, const off64_t *at, ssize_t bytes) {
    return bytes <= 0 ? -1 : at ? *at - bytes : moved_from(fd, bytes);
}

static ssize_t hook_read(int fd, void *out, size_t n) {
    ARRIVED(fd, arrived_next(fd, ONE(out, n)))
    TIMED(fd, moved_from(fd, bytes), read(fd, out, n))
}
static ssize_t hook___read_chk(int fd, void *out, size_t n, size_t room) {
    if (n <= room)
        ARRIVED(fd, arrived_next(fd, ONE(out, n)))
    TIMED(fd, moved_from(fd, bytes), __read_chk(fd, out, n, room))
}
static ssize_t hook_pread(int fd, void *out, size_t n, off_t at) {
    ARRIVED(fd, arrived_at(fd, ONE(out, n), at))
    TIMED(fd, at, pread(fd, out, n, at))
}
static ssize_t hook_pread64(int fd, void *out, size_t n, off64_t at) {
    ARRIVED(fd, arrived_at(fd, ONE(out, n), at))
    TIMED(fd, at, pread64(fd, out, n, at))
}
static ssize_t hook___pread_chk(int fd, void *out, size_t n, off_t at, size_t room) {
    if (n <= room)
        ARRIVED(fd, arrived_at(fd, ONE(out, n), at))
    TIMED(fd, at, __pread_chk(fd, out, n, at, room))
}
static ssize_t hook___pread64_chk(int fd, void *out, size_t n, off64_t at, size_t room) {
    if (n <= room)
        ARRIVED(fd, arrived_at(fd, ONE(out, n), at))
    TIMED(fd, at, __pread64_chk(fd, out, n, at, room))
}
static ssize_t hook_readv(int fd, const struct iovec *parts, int n) {
    ARRIVED(fd, arrived_next(fd, parts, n, 0))
    TIMED(fd, moved_from(fd, bytes), readv(fd, parts, n))
}
static ssize_t hook_preadv(int fd, const struct iovec *parts, int n, off_t at) {
    ARRIVED(fd, arrived_at(fd, parts, n, 0, at))
    TIMED(fd, at, preadv(fd, parts, n, at))
}
static ssize_t hook_preadv64(int fd, const struct iovec *parts, int n, off64_t at) {
    ARRIVED(fd, arrived_at(fd, parts, n, 0, at))
    TIMED(fd, at, preadv64(fd, parts, n, at))
}
/* At -1 they read at the descriptor's own position. */
static ssize_t hook_preadv2(int fd, const struct iovec *parts, int n, off_t at, int flags) {
    if (!flags)
        ARRIVED(fd, at == -1 ? arrived_next(fd, parts, n, 0) : arrived_at(fd, parts, n, 0, at))
    TIMED(fd, at < 0 ? moved_from(fd, bytes) : at, preadv2(fd, parts, n, at, flags))
}
static ssize_t hook_preadv64v2(int fd, const struct iovec *parts, int n, off64_t at, int flags) {
    if (!flags)
        ARRIVED(fd, at == -1 ? arrived_next(fd, parts, n, 0) : arrived_at(fd, parts, n, 0, at))
    TIMED(fd, at < 0 ? moved_from(fd, bytes) : at, preadv64v2(fd, parts, n, at, flags))
}
static ssize_t hook_sendfile(int to, int fd, off_t *at, size_t n) {
    TIMED(fd, began_at(fd, at, bytes), sendfile(to, fd, at, n))
}
static ssize_t hook_sendfile64(int to, int fd, off64_t *at, size_t n) {
    TIMED(fd, began_at(fd, at, bytes), sendfile64(to, fd, at, n))
}
static ssize_t copy_range(int fd, off64_t *at, int to, off64_t *to_at, size_t n, unsigned flags) {
    TIMED(fd, began_at(fd, at, bytes), copy_file_range(fd, at, to, to_at, n, flags))
}
static ssize_t hook_copy_file_range(int fd, off64_t *at, int to, off64_t *to_at, size_t n, unsigned flags) {
    ssize_t bytes = copy_range(fd, at, to, to_at, n, flags);
    return bytes < 0 && copy_surrender(fd) ? copy_range(fd, at, to, to_at, n, flags) : bytes; /* between file systems */
}

static size_t counted_fread(int fd, int kind, size_t size, size_t items, uint64_t begin) {
    count_read(fd, kind, (ssize_t)(size * items), -1, wait_end(kind, begin));
    return items;
}

int fd_of_stream(FILE *stream) {
    int saved = errno, fd = fileno_unlocked(stream);
    errno = saved;
    return fd;
}

static size_t hook_fread(void *out, size_t size, size_t n, FILE *file) {
    int fd = fd_of_stream(file), kind = fd_kind(fd);
    if (kind == FD_OTHER)
        return fread(out, size, n, file);
    kind = moved_kind(fd, kind);
    uint64_t begin = wait_begin(kind);
    return counted_fread(fd, kind, size, fread(out, size, n, file), begin);
}
static size_t hook___fread_chk(void *out, size_t room, size_t size, size_t n, FILE *file) {
    int fd = fd_of_stream(file), kind = fd_kind(fd);
    if (kind == FD_OTHER)
        return __fread_chk(out, room, size, n, file);
    kind = moved_kind(fd, kind);
    uint64_t begin = wait_begin(kind);
    return counted_fread(fd, kind, size, __fread_chk(out, room, size, n, file), begin);
}

/* ---- mappings ---- */
static void counted_map(int fd) {
    int kind = moved_kind(fd, fd_kind(fd));
    if (kind == FD_SOURCE || kind == FD_LOCAL)
        count(kind == FD_SOURCE ? COUNTER_SOURCE_MAPS : COUNTER_LOCAL_MAPS, 1);
}

static void *hook_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset) {
    counted_map(flags & MAP_ANONYMOUS ? -1 : fd);
    return mmap(at, n, protection, flags, fd, offset);
}

static void *hook_mmap64(void *at, size_t n, int protection, int flags, int fd, off64_t offset) {
    counted_map(flags & MAP_ANONYMOUS ? -1 : fd);
    return mmap64(at, n, protection, flags, fd, offset);
}

/* ---- listings ---- */
static __attribute__((noinline)) int is_of_datasets(const char *path) {
    PLACE(at);
    return concerns(AT_FDCWD, path) && locate(AT_FDCWD, path, at) != OUTSIDE && !at->map->quiet;
}

static DIR *hook_opendir(const char *path) {
    int saved = errno, below = is_of_datasets(path);
    errno = saved;
    if (!below)
        return opendir(path);
    uint64_t begin = wait_begin(FD_SOURCE);
    DIR *directory = opendir(path);
    wait_end(FD_SOURCE, begin);
    if (directory) {
        count(COUNTER_LISTINGS, 1);
        fd_mark(dirfd(directory), FD_LISTING);
    }
    return directory;
}

#define HOOK_READDIR(name, type) \
    static struct type *hook_##name(DIR *directory) { \
        if (fd_kind(dirfd(directory)) != FD_LISTING) \
            return name(directory); \
        uint64_t begin = wait_begin(FD_SOURCE); \
        struct type *entry = name(directory); \
        wait_end(FD_SOURCE, begin); \
        return entry; \
    }
HOOK_READDIR(readdir, dirent)
HOOK_READDIR(readdir64, dirent64)

/* ---- marks ---- */
int hpcstage_vforked;

/* A child between vfork and exec closes its own descriptors, but writes in its parent's memory. */
static int only_borrowed(void) {
    return hpcstage_vforked && !slot_is_mine();
}

static int hook_close(int fd) {
    if (fd_kind(fd) != FD_OTHER && !only_borrowed())
        fd_closed(fd);
    return close(fd);
}

static int hook_closedir(DIR *directory) {
    if (fd_kind(dirfd(directory)) != FD_OTHER && !only_borrowed())
        fd_mark(dirfd(directory), FD_OTHER);
    return closedir(directory);
}

static int hook_fclose(FILE *file) {
    fd_closed(fd_of_stream(file));
    return fclose(file);
}

static void unmark_kind(int kind, const unsigned char *from, const unsigned char *end) {
    for (const unsigned char *found; (found = memchr(from, kind, (size_t)(end - from))); from = found + 1)
        fd_closed((int)(found - fd_kinds));
}

static void unmark(unsigned first, unsigned last) {
    if (first >= FDS || only_borrowed())
        return;
    unsigned char *from = fd_kinds + first, *end = last < FDS ? fd_kinds + last + 1 : fd_kinds + FDS;
    unmark_kind(FD_LOCAL, from, end);
    unmark_kind(FD_SOURCE, from, end);
    if (copies_locked) {
        unmark_kind(FD_LOCK, from, end); /* those that are left: of copies that stay open */
    }
    memset(from, FD_OTHER, (size_t)(end - from));
}

static int is_only_thread(void) {
    struct stat tasks;
    int saved = errno, known = stat("/proc/self/task", &tasks) == 0;
    errno = saved;
    return known && tasks.st_nlink == 3;
}

/* A thread that has others may get a table of its own: the marks stay those of the others, who share its open files. */
static int hook_close_range(unsigned first, unsigned last, int flags) {
    int parts = (flags & CLOSE_RANGE_UNSHARE) && !only_borrowed() && !is_only_thread();
    if (parts)
        moved_forks();
    else if (!(flags & ~CLOSE_RANGE_UNSHARE) && first <= last)
        unmark(first, last);
    return close_range(first, last, flags);
}

static void hook_closefrom(int first) {
    unmark(first < 0 ? 0 : (unsigned)first, FDS);
    closefrom(first);
}

/* A number without a mark gets the source, and shares its offset for good. */
static int duplicated_beyond(int from, int to) {
    int flags = fcntl(to, F_GETFD);
    moved_shared(from);
    if (copy_surrender(from))
        dup3(from, to, flags & FD_CLOEXEC ? O_CLOEXEC : 0);
    return to;
}

int fd_duplicated(int from, int to, int is_inherited) {
    if (to < 0 || to == from)
        return to;
    if (only_borrowed()) {
        moved_shared(from);
        return to;
    }
    if (to >= FDS)
        return duplicated_beyond(from, to);
    if (copies_locked)
        copy_closed(to);
    moved_duplicated(from, to, is_inherited);
    fd_mark(to, fd_kind(from));
    if (copies_locked)
        copy_duplicated(from, to);
    return to;
}

static int hook_dup(int fd) HELD(fd, int, fd_duplicated(fd, dup(fd), 1))

/* `to` keeps its file where the call fails. */
#define HOOK_DUP(name, parameters, arguments, is_inherited) \
    static int duplicated_by_##name parameters { \
        int marked = fd != to && (fd_kind(to) == FD_LOCAL || fd_kind(to) == FD_SOURCE) && !only_borrowed(); \
        int kind = marked ? copy_let_go(to) : FD_OTHER; \
        int result = name arguments; \
        if (marked && result < 0) \
            fd_mark(to, kind); \
        return fd_duplicated(fd, result, is_inherited); \
    } \
    static int hook_##name parameters HELD(fd, int, duplicated_by_##name arguments)
HOOK_DUP(dup2, (int fd, int to), (fd, to), 1)
HOOK_DUP(dup3, (int fd, int to, int flags), (fd, to, flags), !(flags & O_CLOEXEC))

#define ENTRY(name) {#name, (void *)hook_##name},
const struct hook hooks_read[] = {
    ENTRY(read) ENTRY(__read_chk) ENTRY(pread) ENTRY(pread64) ENTRY(__pread_chk) ENTRY(__pread64_chk) ENTRY(readv)
    ENTRY(preadv) ENTRY(preadv64) ENTRY(preadv2) ENTRY(preadv64v2) ENTRY(sendfile) ENTRY(sendfile64) ENTRY(copy_file_range) ENTRY(fread)
    ENTRY(__fread_chk) ENTRY(close) ENTRY(fclose) ENTRY(close_range) ENTRY(closefrom) ENTRY(dup) ENTRY(dup2)
    ENTRY(dup3) ENTRY(mmap) ENTRY(mmap64) ENTRY(opendir) ENTRY(readdir) ENTRY(readdir64)
    ENTRY(closedir) {NULL, NULL}};

/* ---- the process ---- */
static int hook_chdir(const char *path) {
    int result = chdir(path);
    if (result == 0)
        cwd_changed();
    return result;
}

static int hook_fchdir(int fd) {
    int result = fchdir(fd);
    if (result == 0)
        cwd_changed();
    return result;
}

static __attribute__((noreturn)) void hook__exit(int status) {
    slot_finish();
    _exit(status);
}

static __attribute__((noreturn)) void hook__Exit(int status) {
    slot_finish();
    _exit(status);
}

/* A handler of a signal may have interrupted a call, and leaves it here. Where it jumps within itself, the call goes on
 * without being counted. */
#define HOOK_JUMP(name, type) \
    static __attribute__((noreturn)) void hook_##name(type at, int value) { \
        waits_left(); \
        name(at, value); \
    }
HOOK_JUMP(longjmp, jmp_buf)
HOOK_JUMP(_longjmp, jmp_buf)
HOOK_JUMP(siglongjmp, sigjmp_buf)
HOOK_JUMP(__longjmp_chk, jmp_buf)

const struct hook hooks_process[] = {
    ENTRY(chdir) ENTRY(fchdir) ENTRY(_exit) ENTRY(_Exit) ENTRY(longjmp) ENTRY(_longjmp) ENTRY(siglongjmp)
    ENTRY(__longjmp_chk) {NULL, NULL}};
