/* Opens: read-only opens of regular files go to the copy if there is one; everything else goes to the source. */
#include "_native.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

extern int __open_2(const char *, int) WEAK;
extern int __open64_2(const char *, int) WEAK;
extern int __openat_2(int, const char *, int) WEAK;
extern int __openat64_2(int, const char *, int) WEAK;

unsigned char fd_kinds[FDS];

enum spelling { OPEN, OPEN64, OPENAT, OPENAT64, OPEN_2, OPEN64_2, OPENAT_2, OPENAT64_2, FOPEN, FOPEN64, CREAT, CREAT64 };

struct call {
    enum spelling spelling;
    int dirfd;
    const char *path;
    int flags;
    mode_t mode;
    const char *fmode;
};

union result {
    int fd;
    FILE *file;
};

static union result original(const struct call *c, const char *path) {
    union result r = {.file = NULL};
    switch (c->spelling) {
    case OPEN: r.fd = open(path, c->flags, c->mode); break;
    case OPEN64: r.fd = open64(path, c->flags, c->mode); break;
    case OPENAT: r.fd = openat(c->dirfd, path, c->flags, c->mode); break;
    case OPENAT64: r.fd = openat64(c->dirfd, path, c->flags, c->mode); break;
    case OPEN_2: r.fd = __open_2(path, c->flags); break;
    case OPEN64_2: r.fd = __open64_2(path, c->flags); break;
    case OPENAT_2: r.fd = __openat_2(c->dirfd, path, c->flags); break;
    case OPENAT64_2: r.fd = __openat64_2(c->dirfd, path, c->flags); break;
    case FOPEN: r.file = fopen(path, c->fmode); break;
    case FOPEN64: r.file = fopen64(path, c->fmode); break;
    case CREAT: r.fd = creat(path, c->mode); break;
    case CREAT64: r.fd = creat64(path, c->mode); break;
    }
    return r;
}

static int is_stream(const struct call *c) {
    return c->spelling == FOPEN || c->spelling == FOPEN64;
}

static int fd_of(const struct call *c, union result r) {
    return is_stream(c) ? (r.file ? fileno_unlocked(r.file) : -1) : r.fd;
}

static void give_up(const struct call *c, union result r) {
    if (is_stream(c))
        fclose(r.file);
    else
        close(r.fd);
}

/* ---- reading ---- */
enum outcome { OPENED, ABSENT, NOT_A_FILE, UNUSABLE, SHUT };

/* The copy must be no directory: they exist in the store too, and a partly staged one would list a subset. Listing
 * nothing of a file fails with ENOTDIR at a third of fstat's cost. A copy with two names stands for a symbolic link,
 * which O_NOFOLLOW must see. */
static int is_copy(int fd, int flags) {
    struct stat info;
    if (flags & O_NOFOLLOW)
        return fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_nlink == 1;
    return syscall(SYS_getdents64, fd, &info, 0) < 0 && errno == ENOTDIR;
}

static enum outcome open_copy(const struct call *c, const struct place *at, union result *r) {
    if (!at->map->quiet && !page_serves())
        return SHUT;
    *r = original(c, at->local);
    int fd = fd_of(c, *r);
    if (fd < 0)
        return errno == ENOENT || errno == ENOTDIR ? ABSENT : UNUSABLE;
    if (fd >= FDS) {
        give_up(c, *r);
        return UNUSABLE;
    }
    if (is_copy(fd, c->flags)) {
        moved_forget(fd);
        fd_mark(fd, at->map->quiet ? FD_OTHER : FD_LOCAL);
        return OPENED;
    }
    give_up(c, *r);
    return NOT_A_FILE;
}

static union result open_source(const struct call *c, const struct place *at, int reason, int counted,
                                uint32_t published) {
    uint64_t begin = counted ? wait_begin(FD_SOURCE) : 0;
    union result r = original(c, c->path);
    uint64_t took = counted ? wait_end(FD_SOURCE, begin) : 0;
    int fd = fd_of(c, r), saved = errno;
    if (fd >= 0) {
        fd_mark(fd, counted ? FD_SOURCE : FD_OTHER);
        if (counted) {
            moved_opened(fd, c->flags, is_stream(c), published);
            count_source_open(took, reason);
            if (logging())
                ring_opened(at, begin + took);
        }
    } else if (counted) {
        count(COUNTER_FAILED_OPENS, 1);
    }
    errno = saved;
    return r;
}

/* After a miss, returns -1 once the daemon has answered READY and the copy is open, else why the source is read. */
static int ask_for_copy(const struct call *c, const struct place *at, union result *r) {
    int reason = request(at);
    if (reason >= 0)
        return reason;
    if (open_copy(c, at, r) != OPENED)
        return REASON_LOCAL_ERROR;
    count(COUNTER_READY_OPENS, 1);
    if (logging())
        ring_opened(at, now_ns());
    return -1;
}

static union result open_for_reading(const struct call *c, const struct place *at) {
    union result r;
    int saved = errno, reason = REASON_NONE;
    uint32_t published = __atomic_load_n(page_published, __ATOMIC_ACQUIRE);
    int is_direct = c->flags & O_DIRECT; /* the copy's file system may want more of addresses and lengths */
    if (!at->map->quiet && (config.direct || is_direct || page_state() == STATE_MEASURING))
        return open_source(c, at, REASON_NONE, 1, published);
    uint64_t begin = at->map->quiet ? 0 : wait_begin(FD_LOCAL);
    enum outcome outcome = open_copy(c, at, &r);
    uint64_t took = at->map->quiet ? 0 : wait_end(FD_LOCAL, begin);
    if (outcome == OPENED) {
        if (!at->map->quiet) {
            count(COUNTER_HIT_OPENS, 1);
            if (logging())
                ring_opened(at, begin + took);
        }
        errno = saved;
        return r;
    }
    if (outcome == SHUT)
        reason = page_is_closed() ? REASON_LOCAL_ERROR : REASON_TIMEOUT;
    else if (outcome == UNUSABLE)
        reason = REASON_LOCAL_ERROR;
    else if (outcome == ABSENT && !at->map->quiet)
        reason = ask_for_copy(c, at, &r);
    errno = saved;
    return reason < 0 ? r : open_source(c, at, reason, outcome != NOT_A_FILE && !at->map->quiet, published);
}

/* ---- writing ---- */

/* Whether an open may write: not to a directory, which would take all below it along, nor to a file that only looks
 * written to. */
static int could_write(const struct call *c, struct stat *info) {
    int saved = errno, could = c->flags & O_CREAT;
    info->st_mode = 0;
    if (fstatat(c->dirfd, c->path, info, 0) == 0)
        could = !S_ISDIR(info->st_mode) && (faccessat(c->dirfd, c->path, W_OK, AT_EACCESS) == 0 ||
                                           (errno != EACCES && errno != EROFS && errno != EPERM));
    errno = saved;
    return could;
}

/* The name that was opened may lead to another file below a dataset by a symbolic link. */
static void drop_what_was_opened(int fd, const struct place *named) {
    PLACE(opened);
    if (locate_fd(fd, opened) == FILE_NAME && strcmp(named->local, opened->local) != 0)
        drop(opened);
}

static union result open_for_writing(const struct call *c, const struct place *at) {
    struct stat before, now;
    int dropped = could_write(c, &before);
    if (dropped)
        drop_file(at, &before);
    union result r = original(c, c->path);
    int fd = fd_of(c, r);
    if (fd < 0)
        return r;
    fd_mark(fd, FD_OTHER);
    int known = fstat(fd, &now) == 0;
    if (!dropped)
        drop_file(at, known ? &now : NULL);
    else if (known && before.st_mode && (before.st_ino != now.st_ino || before.st_dev != now.st_dev))
        landed(&now);
    drop_what_was_opened(fd, at);
    count(COUNTER_WRITE_OPENS, 1);
    return r;
}

/* ---- both ---- */
static int writes(int flags) {
    return !(flags & O_PATH) && (flags & O_TMPFILE) != O_TMPFILE && ((flags & O_ACCMODE) != O_RDONLY || (flags & (O_TRUNC | O_CREAT | O_APPEND)));
}

/* A file outside of the datasets, as far as names tell, may be one of theirs by another name when it is written to. */
static inline union result open_elsewhere(const struct call *c) {
    union result r = original(c, c->path);
    int fd = fd_of(c, r);
    fd_mark(fd, FD_OTHER);
    if (fd >= 0 && writes(c->flags) && (c->flags & (O_CREAT | O_EXCL)) != (O_CREAT | O_EXCL))
        landed_fd(fd);
    return r;
}

static __attribute__((noinline)) union result open_below(const struct call *c) {
    PLACE(at);
    int how = OPENS | (c->flags & O_NOFOLLOW ? 0 : FOLLOWED) | (writes(c->flags) ? AFRESH : 0);
    enum kind kind = locate_as(how, c->dirfd, c->path, at);
    if (kind == FILE_NAME && writes(c->flags))
        return open_for_writing(c, at);
    if (kind == FILE_NAME && !(c->flags & (O_DIRECTORY | O_PATH)))
        return open_for_reading(c, at);
    return open_elsewhere(c);
}

/* A program that writes to a descriptor of a copy, by the descriptor's own name, writes to the source. */
static __attribute__((noinline)) union result reopen(const struct call *c, int fd) {
    if (writes(c->flags))
        copy_changes(fd);
    else if (c->flags & O_DIRECT)
        copy_surrender(fd);
    union result r = original(c, c->path);
    int opened = fd_of(c, r);
    if (opened >= FDS && fd_kind(fd) == FD_LOCAL && copy_surrender(fd)) {
        give_up(c, r);
        r = original(c, c->path);
        opened = fd_of(c, r);
    }
    moved_forget(opened);
    fd_mark(opened, writes(c->flags) || (c->flags & O_PATH) ? FD_OTHER : fd_kind(fd));
    if (opened >= 0 && writes(c->flags))
        count(COUNTER_WRITE_OPENS, 1);
    return r;
}

static inline union result route(const struct call *c) {
    int named = copy_named(c->path);
    if (__builtin_expect(named >= 0, 0))
        return reopen(c, named);
    /* landed_fd finds out where a file is that was opened for writing. */
    if (concerns_as(writes(c->flags) ? 0 : OPENS, c->dirfd, c->path))
        return open_below(c);
    return open_elsewhere(c);
}

#define MODE(flags) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode = (mode_t)va_arg(arguments, int); \
        va_end(arguments); \
    }
#define HOOK_OPEN(name, spelling) \
    static int hook_##name(const char *path, int flags, ...) { \
        MODE(flags) \
        return route(&(struct call){spelling, AT_FDCWD, path, flags, mode, NULL}).fd; \
    }
#define HOOK_OPENAT(name, spelling) \
    static int hook_##name(int dirfd, const char *path, int flags, ...) { \
        MODE(flags) \
        return route(&(struct call){spelling, dirfd, path, flags, mode, NULL}).fd; \
    }
#define HOOK_CREAT(name, spelling) \
    static int hook_##name(const char *path, mode_t mode) { \
        return route(&(struct call){spelling, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode, NULL}).fd; \
    }
#define HOOK_FOPEN(name, spelling) \
    static FILE *hook_##name(const char *path, const char *fmode) { \
        return route(&(struct call){spelling, AT_FDCWD, path, flags_of(fmode), 0, fmode}).file; \
    }

static int flags_of(const char *fmode) {
    if (fmode[0] == 'r')
        return strchr(fmode, '+') ? O_RDWR : O_RDONLY;
    return fmode[0] == 'a' ? O_WRONLY | O_CREAT | O_APPEND : O_WRONLY | O_CREAT | O_TRUNC;
}

HOOK_OPEN(open, OPEN)
HOOK_OPEN(open64, OPEN64)
HOOK_OPENAT(openat, OPENAT)
HOOK_OPENAT(openat64, OPENAT64)
HOOK_OPEN(__open_2, OPEN_2)
HOOK_OPEN(__open64_2, OPEN64_2)
HOOK_OPENAT(__openat_2, OPENAT_2)
HOOK_OPENAT(__openat64_2, OPENAT64_2)
HOOK_CREAT(creat, CREAT)
HOOK_CREAT(creat64, CREAT64)
HOOK_FOPEN(fopen, FOPEN)
HOOK_FOPEN(fopen64, FOPEN64)

/* freopen closes the stream when the open fails, so there is no second try: it always goes to the source. */
static __attribute__((noinline)) void before_freopen(const char *path, const char *fmode) {
    PLACE(at);
    if (flags_of(fmode) != O_RDONLY && locate_as(FOLLOWED | AFRESH, AT_FDCWD, path, at) == FILE_NAME) {
        drop(at);
        count(COUNTER_WRITE_OPENS, 1);
    }
}

/* Without a name a stream's own file is opened again. */
static void before_reopening_stream(int fd, const char *fmode) {
    int kind = fd_kind(fd);
    if (kind == FD_LOCAL && flags_of(fmode) == O_RDONLY)
        copy_surrender(fd);
    if ((kind == FD_LOCAL || kind == FD_SOURCE) && flags_of(fmode) != O_RDONLY) {
        copy_changes(fd);
        count(COUNTER_WRITE_OPENS, 1);
    }
}

#define HOOK_FREOPEN(name) \
    static FILE *hook_##name(const char *path, const char *fmode, FILE *stream) { \
        int fd = fd_of_stream(stream), again = path ? copy_named(path) : fd; \
        if (again >= 0) \
            before_reopening_stream(again, fmode); \
        else if (path && concerns_as(AFRESH, AT_FDCWD, path)) \
            before_freopen(path, fmode); \
        fd_closed(fd); \
        FILE *file = name(path, fmode, stream); \
        if (file) \
            fd_mark(fd_of_stream(file), FD_OTHER); \
        if (file && flags_of(fmode) != O_RDONLY) \
            landed_fd(fd_of_stream(file)); \
        return file; \
    }
HOOK_FREOPEN(freopen)
HOOK_FREOPEN(freopen64)

#define ENTRY(name) {#name, (void *)hook_##name},
const struct hook hooks_open[] = {
    ENTRY(open) ENTRY(open64) ENTRY(openat) ENTRY(openat64) ENTRY(__open_2) ENTRY(__open64_2) ENTRY(__openat_2)
    ENTRY(__openat64_2) ENTRY(creat) ENTRY(creat64) ENTRY(fopen) ENTRY(fopen64) ENTRY(freopen) ENTRY(freopen64)
    {NULL, NULL}};
