/* stat, lstat, statx, access: answered from the copy where there is one, so that they agree with what open gives. */
#include "_native.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

extern int __xstat(int, const char *, struct stat *) WEAK;
extern int __lxstat(int, const char *, struct stat *) WEAK;
extern int __xstat64(int, const char *, struct stat64 *) WEAK;
extern int __lxstat64(int, const char *, struct stat64 *) WEAK;
extern int __fxstatat(int, int, const char *, struct stat *, int) WEAK;
extern int __fxstatat64(int, int, const char *, struct stat64 *, int) WEAK;
extern int stat(const char *, struct stat *) WEAK;
extern int lstat(const char *, struct stat *) WEAK;
extern int fstatat(int, const char *, struct stat *, int) WEAK;
extern int stat64(const char *, struct stat64 *) WEAK;
extern int lstat64(const char *, struct stat64 *) WEAK;
extern int fstatat64(int, const char *, struct stat64 *, int) WEAK;
extern int __fxstat(int, int, struct stat *) WEAK;
extern int __fxstat64(int, int, struct stat64 *) WEAK;
extern int fstat(int, struct stat *) WEAK;
extern int fstat64(int, struct stat64 *) WEAK;
_Static_assert(sizeof(struct stat) == sizeof(struct stat64), "one layout");

enum answer { ELSEWHERE, BY_COPY, BY_SOURCE };

/* Whether there is a place where a copy may answer. Counts what the source has to answer otherwise. */
static enum answer findable(int dirfd, const char *path, int nofollow, struct place *at) {
    enum kind kind = locate_as(nofollow ? 0 : FOLLOWED, dirfd, path, at);
    if (kind == OUTSIDE)
        return ELSEWHERE;
    if (kind != FILE_NAME)
        return at->map->quiet ? ELSEWHERE : BY_SOURCE;
    if (at->map->quiet)
        return BY_COPY;
    if (!config.direct && page_state() != STATE_MEASURING && page_serves())
        return BY_COPY;
    count(COUNTER_SOURCE_STATS, 1);
    return BY_SOURCE;
}

/* The source answers: the time that this takes is a wait. */
#define FROM_SOURCE(call) \
    { \
        uint64_t begin = wait_begin(FD_SOURCE); \
        int result = call; \
        wait_end(FD_SOURCE, begin); \
        return result; \
    }
#define ANSWERED(by, call) \
    { \
        enum answer answer = by; \
        if (answer == BY_COPY) \
            return 0; \
        if (answer == BY_SOURCE) \
            FROM_SOURCE(call) \
    }

static void counted(const struct place *at, int hit) {
    if (!at->map->quiet)
        count(hit ? COUNTER_HIT_STATS : COUNTER_SOURCE_STATS, 1);
}

static enum answer answer_of(const struct place *at, int hit) {
    return hit ? BY_COPY : at->map->quiet ? ELSEWHERE : BY_SOURCE;
}

/* A copy with a second name stands for a symbolic link at the source. */
static int answers(const struct stat *s, int nofollow) {
    return S_ISREG(s->st_mode) && !(nofollow && s->st_nlink != 1);
}

static __attribute__((noinline)) enum answer stat_copy(int dirfd, const char *path, struct stat *out, int nofollow) {
    PLACE(at);
    struct stat info;
    int saved = errno;
    enum answer found = findable(dirfd, path, nofollow, at);
    if (found != BY_COPY)
        return found;
    int hit = fstatat(AT_FDCWD, at->local, &info, AT_SYMLINK_NOFOLLOW) == 0 && answers(&info, nofollow) &&
              (at->map->quiet || attributes_put(&info));
    errno = saved;
    counted(at, hit);
    if (hit)
        *out = info;
    return answer_of(at, hit);
}

#define HOOK_STAT(name, type, nofollow) \
    static int hook_##name(const char *path, struct type *out) { \
        if (concerns(AT_FDCWD, path)) \
            ANSWERED(stat_copy(AT_FDCWD, path, (struct stat *)out, nofollow), name(path, out)) \
        if (!nofollow && attributes_of_named(path, (struct stat *)out)) \
            return 0; \
        return name(path, out); \
    }
#define HOOK_XSTAT(name, type, nofollow) \
    static int hook_##name(int version, const char *path, struct type *out) { \
        if (concerns(AT_FDCWD, path)) \
            ANSWERED(stat_copy(AT_FDCWD, path, (struct stat *)out, nofollow), name(version, path, out)) \
        return name(version, path, out); \
    }
static inline int of_descriptor(const char *path, int flags) {
    return (flags & AT_EMPTY_PATH) && path && !*path;
}

#define HOOK_STATAT(name, type) \
    static int hook_##name(int dirfd, const char *path, struct type *out, int flags) { \
        if (concerns(dirfd, path)) \
            ANSWERED(stat_copy(dirfd, path, (struct stat *)out, flags & AT_SYMLINK_NOFOLLOW), name(dirfd, path, out, flags)) \
        if (of_descriptor(path, flags)) { \
            moved_kind(dirfd, fd_kind(dirfd)); \
            return attributes_result(name(dirfd, path, out, flags), dirfd, out); \
        } \
        if (!(flags & AT_SYMLINK_NOFOLLOW) && attributes_of_named(path, (struct stat *)out)) \
            return 0; \
        return name(dirfd, path, out, flags); \
    }
#define HOOK_XSTATAT(name, type) \
    static int hook_##name(int version, int dirfd, const char *path, struct type *out, int flags) { \
        if (concerns(dirfd, path)) \
            ANSWERED(stat_copy(dirfd, path, (struct stat *)out, flags & AT_SYMLINK_NOFOLLOW), name(version, dirfd, path, out, flags)) \
        return name(version, dirfd, path, out, flags); \
    }
HOOK_STAT(stat, stat, 0)
HOOK_STAT(stat64, stat64, 0)
HOOK_STAT(lstat, stat, 1)
HOOK_STAT(lstat64, stat64, 1)
HOOK_XSTAT(__xstat, stat, 0)
HOOK_XSTAT(__xstat64, stat64, 0)
HOOK_XSTAT(__lxstat, stat, 1)
HOOK_XSTAT(__lxstat64, stat64, 1)
HOOK_STATAT(fstatat, stat)
HOOK_STATAT(fstatat64, stat64)
HOOK_XSTATAT(__fxstatat, stat)
HOOK_XSTATAT(__fxstatat64, stat64)

/* For an open file of the source: what the client knows of it may be too old, and it asks. */
#define HOOK_FSTAT(name, type) \
    static int hook_##name(int fd, struct type *out) { \
        if (moved_kind(fd, fd_kind(fd)) == FD_SOURCE) \
            FROM_SOURCE(name(fd, out)) \
        return attributes_result(name(fd, out), fd, out); \
    }
#define HOOK_FXSTAT(name, type) \
    static int hook_##name(int version, int fd, struct type *out) { \
        if (moved_kind(fd, fd_kind(fd)) == FD_SOURCE) \
            FROM_SOURCE(name(version, fd, out)) \
        return attributes_result(name(version, fd, out), fd, out); \
    }
HOOK_FSTAT(fstat, stat)
HOOK_FSTAT(fstat64, stat64)
HOOK_FXSTAT(__fxstat, stat)
HOOK_FXSTAT(__fxstat64, stat64)

#ifdef STATX_TYPE
extern int statx(int, const char *, int, unsigned, struct statx *) WEAK;

static __attribute__((noinline)) enum answer statx_copy(int dirfd, const char *path, int flags, unsigned mask,
                                                        struct statx *out) {
    PLACE(at);
    struct statx info;
    int saved = errno;
    enum answer found = findable(dirfd, path, flags & AT_SYMLINK_NOFOLLOW, at);
    if (found != BY_COPY)
        return found;
    int hit = !(mask & STATX_BTIME) && /* when a file was made is known to its source only */
              statx(AT_FDCWD, at->local, AT_SYMLINK_NOFOLLOW, mask | STATX_BASIC_STATS, &info) == 0 &&
              S_ISREG(info.stx_mode) && !((flags & AT_SYMLINK_NOFOLLOW) && info.stx_nlink != 1) &&
              (at->map->quiet || attributes_put_x(&info));
    errno = saved;
    counted(at, hit);
    if (hit)
        *out = info;
    return answer_of(at, hit);
}

/* Answers for a descriptor of a copy, by its number; returns 0 if it is none. */
static __attribute__((noinline)) int statx_open(int fd, unsigned mask, struct statx *out) {
    ROOM(char, source);
    struct statx now;
    int saved = errno;
    if (statx(fd, "", AT_EMPTY_PATH, mask | STATX_BASIC_STATS, out) != 0)
        return 0;
    if (!(mask & STATX_BTIME) && attributes_put_x(out))
        return 1;
    int same = source && copy_source(fd, source) && statx(AT_FDCWD, source, 0, mask | STATX_BASIC_STATS, &now) == 0 &&
               now.stx_size == out->stx_size && now.stx_mtime.tv_sec == out->stx_mtime.tv_sec &&
               now.stx_mtime.tv_nsec == out->stx_mtime.tv_nsec;
    errno = saved;
    count(COUNTER_SOURCE_STATS, 1);
    if (same)
        *out = now;
    return 1;
}

static int hook_statx(int dirfd, const char *path, int flags, unsigned mask, struct statx *out) {
    if (concerns(dirfd, path))
        ANSWERED(statx_copy(dirfd, path, flags, mask, out), statx(dirfd, path, flags, mask, out))
    if (of_descriptor(path, flags) && moved_kind(dirfd, fd_kind(dirfd)) == FD_LOCAL && statx_open(dirfd, mask, out))
        return 0;
    return statx(dirfd, path, flags, mask, out);
}
#endif

/* Only "does it exist" and "can it be read" are asked of the copy: it carries our ownership, and writes go elsewhere. */
static __attribute__((noinline)) enum answer access_copy(int dirfd, const char *path, int mode, int flags) {
    PLACE(at);
    struct stat info;
    int saved = errno;
    if (mode & (W_OK | X_OK))
        return ELSEWHERE;
    enum answer found = findable(dirfd, path, flags & AT_SYMLINK_NOFOLLOW, at);
    if (found != BY_COPY)
        return found;
    int hit = fstatat(AT_FDCWD, at->local, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
              answers(&info, flags & AT_SYMLINK_NOFOLLOW) && (mode == F_OK || access(at->local, mode) == 0);
    errno = saved;
    counted(at, hit);
    return answer_of(at, hit);
}

#define HOOK_ACCESS(name) \
    static int hook_##name(const char *path, int mode) { \
        if (concerns(AT_FDCWD, path)) \
            ANSWERED(access_copy(AT_FDCWD, path, mode, 0), name(path, mode)) \
        return name(path, mode); \
    }
HOOK_ACCESS(access)
HOOK_ACCESS(euidaccess)
HOOK_ACCESS(eaccess)

static int hook_faccessat(int dirfd, const char *path, int mode, int flags) {
    if (concerns(dirfd, path))
        ANSWERED(access_copy(dirfd, path, mode, flags), faccessat(dirfd, path, mode, flags))
    return faccessat(dirfd, path, mode, flags);
}

#define ENTRY(name) {#name, (void *)hook_##name},
const struct hook hooks_stat[] = {
    ENTRY(stat) ENTRY(stat64) ENTRY(lstat) ENTRY(lstat64) ENTRY(__xstat) ENTRY(__xstat64) ENTRY(__lxstat)
    ENTRY(__lxstat64) ENTRY(fstatat) ENTRY(fstatat64) ENTRY(__fxstatat) ENTRY(__fxstatat64) ENTRY(fstat)
    ENTRY(fstat64) ENTRY(__fxstat) ENTRY(__fxstat64) ENTRY(access)
    ENTRY(euidaccess) ENTRY(eaccess) ENTRY(faccessat)
#ifdef STATX_TYPE
    ENTRY(statx)
#endif
    {NULL, NULL}};
