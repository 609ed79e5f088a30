/* Calls that change what a name below a dataset stands for: the copy is dropped first, then the source is changed. */
#include "_native.h"

#include <errno.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>
#include <utime.h>

extern int renameat2(int, const char *, int, const char *, unsigned) WEAK;

static __attribute__((noinline)) void drop_named(int dirfd, const char *path, int moves) {
    struct place at;
    struct stat info;
    enum kind kind = locate(dirfd, path, &at);
    if (kind != FILE_NAME && kind != DIR_NAME)
        return;
    int saved = errno;
    int directory = fstatat(dirfd, path, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(info.st_mode);
    errno = saved;
    if (moves || !directory)
        drop(&at);
}

/* A directory's own mode and times mean nothing to the files in it. */
static inline void before(int dirfd, const char *path) {
    if (concerns(dirfd, path))
        drop_named(dirfd, path, 0);
}

static inline void before_move(int dirfd, const char *path) {
    if (concerns(dirfd, path))
        drop_named(dirfd, path, 1);
}

static int hook_unlink(const char *path) {
    before(AT_FDCWD, path);
    return unlink(path);
}

static int hook_unlinkat(int dirfd, const char *path, int flags) {
    if (!(flags & AT_REMOVEDIR)) /* a directory that can be removed is empty: it has no copies */
        before(dirfd, path);
    return unlinkat(dirfd, path, flags);
}

static int hook_remove(const char *path) {
    before(AT_FDCWD, path);
    return remove(path);
}

static int hook_rename(const char *from, const char *to) {
    before_move(AT_FDCWD, from);
    before_move(AT_FDCWD, to);
    return rename(from, to);
}

static int hook_renameat(int from_dirfd, const char *from, int to_dirfd, const char *to) {
    before_move(from_dirfd, from);
    before_move(to_dirfd, to);
    return renameat(from_dirfd, from, to_dirfd, to);
}

static int hook_renameat2(int from_dirfd, const char *from, int to_dirfd, const char *to, unsigned flags) {
    before_move(from_dirfd, from);
    before_move(to_dirfd, to);
    return renameat2(from_dirfd, from, to_dirfd, to, flags);
}

static int hook_truncate(const char *path, off_t length) {
    before(AT_FDCWD, path);
    return truncate(path, length);
}

static int hook_truncate64(const char *path, off64_t length) {
    before(AT_FDCWD, path);
    return truncate64(path, length);
}

static int hook_chmod(const char *path, mode_t mode) {
    before(AT_FDCWD, path);
    return chmod(path, mode);
}

static int hook_fchmodat(int dirfd, const char *path, mode_t mode, int flags) {
    before(dirfd, path);
    return fchmodat(dirfd, path, mode, flags);
}

static int hook_utime(const char *path, const struct utimbuf *times) {
    before(AT_FDCWD, path);
    return utime(path, times);
}

static int hook_utimes(const char *path, const struct timeval times[2]) {
    before(AT_FDCWD, path);
    return utimes(path, times);
}

static int hook_lutimes(const char *path, const struct timeval times[2]) {
    before(AT_FDCWD, path);
    return lutimes(path, times);
}

static int hook_futimesat(int dirfd, const char *path, const struct timeval times[2]) {
    before(dirfd, path);
    return futimesat(dirfd, path, times);
}

/* ---- through an open file: one that was opened in the store stands for its source ---- */

/* 0: not a copy. Else `source` is the name to act on; the copy is gone. */
static __attribute__((noinline)) int source_of_copy(int fd, char *source) {
    struct place at;
    if (locate_copy(fd, &at) != FILE_NAME)
        return 0;
    source_of(&at, source);
    if (!source[0])
        return 0;
    drop(&at);
    return 1;
}

static int hook_fchmod(int fd, mode_t mode) {
    char source[PATH_MAX];
    if (fd_kind(fd) == FD_LOCAL && source_of_copy(fd, source))
        return chmod(source, mode);
    return fchmod(fd, mode);
}

static int hook_fchown(int fd, uid_t uid, gid_t gid) {
    char source[PATH_MAX];
    if (fd_kind(fd) == FD_LOCAL && source_of_copy(fd, source))
        return chown(source, uid, gid);
    return fchown(fd, uid, gid);
}

static int hook_futimens(int fd, const struct timespec times[2]) {
    char source[PATH_MAX];
    if (fd_kind(fd) == FD_LOCAL && source_of_copy(fd, source))
        return utimensat(AT_FDCWD, source, times, 0);
    return futimens(fd, times);
}

static int hook_utimensat(int dirfd, const char *path, const struct timespec times[2], int flags) {
    if (!path)
        return hook_futimens(dirfd, times);
    before(dirfd, path);
    return utimensat(dirfd, path, times, flags);
}

static int hook_futimes(int fd, const struct timeval times[2]) {
    char source[PATH_MAX];
    if (fd_kind(fd) == FD_LOCAL && source_of_copy(fd, source))
        return utimes(source, times);
    return futimes(fd, times);
}

#define ENTRY(name) {#name, (void *)hook_##name},
const struct hook hooks_write[] = {
    ENTRY(unlink) ENTRY(unlinkat) ENTRY(remove) ENTRY(rename) ENTRY(renameat) ENTRY(renameat2) ENTRY(truncate)
    ENTRY(truncate64) ENTRY(chmod) ENTRY(fchmodat) ENTRY(utime) ENTRY(utimes) ENTRY(lutimes) ENTRY(futimesat)
    ENTRY(utimensat) ENTRY(fchmod) ENTRY(fchown) ENTRY(futimens) ENTRY(futimes) {NULL, NULL}};
