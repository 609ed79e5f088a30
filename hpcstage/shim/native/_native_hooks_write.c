/* Hooks calls that change what a name below a dataset stands for: the copy is dropped first, then the source is
 * changed. */
#include "_native.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

extern int renameat2(int, const char *, int, const char *, unsigned) WEAK;

/* Drops what the kernel finds by a name that is changed, under its own name and as an inode: it may be a dataset's by a
 * link that only the kernel follows, or by another name of the file. */
static __attribute__((noinline)) void drop_reached(int dirfd, const char *path, int how, int moves, const struct place *named) {
    struct stat info;
    PLACE(at);
    if (config.direct || page_state() == STATE_MEASURING)
        return;
    int saved = errno;
    if (fstatat(dirfd, path, &info, how & FOLLOWED ? 0 : AT_SYMLINK_NOFOLLOW) != 0 || !page_may_hold(info.st_dev)) {
        errno = saved;
        return;
    }
    int fd = openat(dirfd, path, O_PATH | O_CLOEXEC | (how & FOLLOWED ? 0 : O_NOFOLLOW));
    if (fd >= 0 && fstat(fd, &info) == 0 && (moves || !S_ISDIR(info.st_mode))) {
        enum kind kind = locate_fd(fd, at);
        if (kind != FILE_NAME && kind != DIR_NAME) {
            landed(&info);
        } else if (!named || strcmp(named->local, at->local) != 0) {
            drop_file(at, &info);
        }
    } else if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
        landed(&info); /* no descriptor is free: the inode alone says which file it is */
    }
    if (fd >= 0)
        close(fd);
    errno = saved;
}

static __attribute__((noinline)) void drop_named(int dirfd, const char *path, int how, int moves) {
    PLACE(at);
    struct stat info;
    enum kind kind = locate_as(how | AFRESH, dirfd, path, at);
    if (kind != FILE_NAME && kind != DIR_NAME) {
        drop_reached(dirfd, path, how, moves, NULL);
        return;
    }
    int saved = errno;
    int there = fstatat(dirfd, path, &info, how & FOLLOWED ? 0 : AT_SYMLINK_NOFOLLOW) == 0;
    errno = saved;
    if (!moves && there && S_ISDIR(info.st_mode))
        return;
    drop_file(at, there ? &info : NULL);
    if (there)
        drop_reached(dirfd, path, how, moves, at);
}

/* A directory's own mode and times mean nothing to the files in it. */
static inline void before(int dirfd, const char *path, int how) {
    int named = copy_named(path);
    if (named >= 0)
        copy_changes(named);
    else if (concerns_as(how, dirfd, path))
        drop_named(dirfd, path, how, 0);
    else
        drop_reached(dirfd, path, how, 0, NULL);
}

static inline void before_move(int dirfd, const char *path) {
    if (concerns_as(0, dirfd, path))
        drop_named(dirfd, path, 0, 1);
    else
        drop_reached(dirfd, path, 0, 1, NULL);
}

/* A directory or a link that came under a name may lead all below it elsewhere. */
static int moved(int result, int dirfd, const char *to) {
    struct stat info;
    int saved = errno;
    if (result == 0 && (fstatat(dirfd, to, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode)))
        names_forget();
    errno = saved;
    return result;
}

static int hook_symlink(const char *target, const char *path) {
    return moved(symlink(target, path), AT_FDCWD, path);
}

static int hook_symlinkat(const char *target, int dirfd, const char *path) {
    return moved(symlinkat(target, dirfd, path), dirfd, path);
}

static int hook_unlink(const char *path) {
    int turns = roots_before_unlink(AT_FDCWD, path);
    before(AT_FDCWD, path, 0);
    return roots_after(turns, unlink(path));
}

static int hook_unlinkat(int dirfd, const char *path, int flags) {
    if (flags & AT_REMOVEDIR) /* a directory that can be removed is empty: it has no copies */
        return unlinkat(dirfd, path, flags);
    int turns = roots_before_unlink(dirfd, path);
    before(dirfd, path, 0);
    return roots_after(turns, unlinkat(dirfd, path, flags));
}

static int hook_remove(const char *path) {
    int turns = roots_before_unlink(AT_FDCWD, path);
    before(AT_FDCWD, path, 0);
    return roots_after(turns, remove(path));
}

static int hook_rename(const char *from, const char *to) {
    int turns = roots_before(AT_FDCWD, from) | roots_before(AT_FDCWD, to);
    before_move(AT_FDCWD, from);
    before_move(AT_FDCWD, to);
    return roots_after(turns, moved(rename(from, to), AT_FDCWD, to));
}

static int hook_renameat(int from_dirfd, const char *from, int to_dirfd, const char *to) {
    int turns = roots_before(from_dirfd, from) | roots_before(to_dirfd, to);
    before_move(from_dirfd, from);
    before_move(to_dirfd, to);
    return roots_after(turns, moved(renameat(from_dirfd, from, to_dirfd, to), to_dirfd, to));
}

static int hook_renameat2(int from_dirfd, const char *from, int to_dirfd, const char *to, unsigned flags) {
    int turns = roots_before(from_dirfd, from) | roots_before(to_dirfd, to);
    before_move(from_dirfd, from);
    before_move(to_dirfd, to);
    return roots_after(turns, moved(renameat2(from_dirfd, from, to_dirfd, to, flags), to_dirfd, to));
}

static int hook_truncate(const char *path, off_t length) {
    before(AT_FDCWD, path, FOLLOWED);
    return truncate(path, length);
}

static int hook_truncate64(const char *path, off64_t length) {
    before(AT_FDCWD, path, FOLLOWED);
    return truncate64(path, length);
}

static int hook_chmod(const char *path, mode_t mode) {
    before(AT_FDCWD, path, FOLLOWED);
    return chmod(path, mode);
}

static int hook_fchmodat(int dirfd, const char *path, mode_t mode, int flags) {
    before(dirfd, path, flags & AT_SYMLINK_NOFOLLOW ? 0 : FOLLOWED);
    return fchmodat(dirfd, path, mode, flags);
}

static int hook_utime(const char *path, const struct utimbuf *times) {
    before(AT_FDCWD, path, FOLLOWED);
    return utime(path, times);
}

static int hook_utimes(const char *path, const struct timeval times[2]) {
    before(AT_FDCWD, path, FOLLOWED);
    return utimes(path, times);
}

static int hook_lutimes(const char *path, const struct timeval times[2]) {
    before(AT_FDCWD, path, 0);
    return lutimes(path, times);
}

static int hook_futimesat(int dirfd, const char *path, const struct timeval times[2]) {
    if (path)
        before(dirfd, path, FOLLOWED);
    else
        copy_changes(dirfd);
    return futimesat(dirfd, path, times);
}

static int hook_utimensat(int dirfd, const char *path, const struct timespec times[2], int flags) {
    if (!path || (!*path && (flags & AT_EMPTY_PATH)))
        copy_changes(dirfd);
    else
        before(dirfd, path, flags & AT_SYMLINK_NOFOLLOW ? 0 : FOLLOWED);
    return utimensat(dirfd, path, times, flags);
}

static int hook_chown(const char *path, uid_t uid, gid_t gid) {
    before(AT_FDCWD, path, FOLLOWED);
    return chown(path, uid, gid);
}

static int hook_lchown(const char *path, uid_t uid, gid_t gid) {
    before(AT_FDCWD, path, 0);
    return lchown(path, uid, gid);
}

static int hook_fchownat(int dirfd, const char *path, uid_t uid, gid_t gid, int flags) {
    if (path && !*path && (flags & AT_EMPTY_PATH))
        copy_changes(dirfd);
    else
        before(dirfd, path, flags & AT_SYMLINK_NOFOLLOW ? 0 : FOLLOWED);
    return fchownat(dirfd, path, uid, gid, flags);
}

static int hook_setxattr(const char *path, const char *name, const void *value, size_t n, int flags) {
    before(AT_FDCWD, path, FOLLOWED);
    return setxattr(path, name, value, n, flags);
}

static int hook_lsetxattr(const char *path, const char *name, const void *value, size_t n, int flags) {
    before(AT_FDCWD, path, 0);
    return lsetxattr(path, name, value, n, flags);
}

static int hook_removexattr(const char *path, const char *name) {
    before(AT_FDCWD, path, FOLLOWED);
    return removexattr(path, name);
}

static int hook_lremovexattr(const char *path, const char *name) {
    before(AT_FDCWD, path, 0);
    return lremovexattr(path, name);
}

/* A further name changes the number of names that the file has. */
static int hook_link(const char *from, const char *to) {
    before(AT_FDCWD, from, 0);
    return link(from, to);
}

static int hook_linkat(int from_dirfd, const char *from, int to_dirfd, const char *to, int flags) {
    if (from && !*from && (flags & AT_EMPTY_PATH))
        copy_changes(from_dirfd);
    else
        before(from_dirfd, from, flags & AT_SYMLINK_FOLLOW ? FOLLOWED : 0);
    return linkat(from_dirfd, from, to_dirfd, to, flags);
}

#define ENTRY(name) {#name, (void *)hook_##name},
const struct hook hooks_write[] = {
    ENTRY(symlink) ENTRY(symlinkat) ENTRY(unlink) ENTRY(unlinkat) ENTRY(remove) ENTRY(rename) ENTRY(renameat)
    ENTRY(renameat2) ENTRY(truncate) ENTRY(truncate64) ENTRY(chmod) ENTRY(fchmodat) ENTRY(utime) ENTRY(utimes) ENTRY(lutimes) ENTRY(futimesat)
    ENTRY(utimensat) ENTRY(chown) ENTRY(lchown) ENTRY(fchownat) ENTRY(setxattr) ENTRY(lsetxattr) ENTRY(removexattr)
    ENTRY(lremovexattr) ENTRY(link) ENTRY(linkat) {NULL, NULL}};
