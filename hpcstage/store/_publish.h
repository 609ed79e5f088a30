/* How a copy gets its name: it appears complete or not at all, and never in the place of something that is there.
 *
 * Shared by what copies from the source and what writes files that come from other nodes. Where the file system can,
 * a file is written without a name, in its final directory, and linked; else under a temporary name and moved.
 */
#ifndef HPCSTAGE_PUBLISH_H
#define HPCSTAGE_PUBLISH_H

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

static volatile int nameless = 1;

static int make_parents(const char *path) {
    char *copy = strdup(path);
    if (!copy) return -1;
    int result = 0;
    for (char *slash = strchr(copy + 1, '/'); slash && !result; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(copy, 0700) < 0 && errno != EEXIST) result = -1;
        *slash = '/';
    }
    free(copy);
    return result;
}

static int move_once(const char *from, const char *to) {
#ifdef SYS_renameat2
    if (syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, RENAME_NOREPLACE) == 0) return 0;
    if (errno != EINVAL && errno != ENOSYS) return -1;
#endif
    if (link(from, to) < 0) return -1;
    unlink(from);
    return 0;
}

/* Where there is no temporary name, the descriptor itself is linked. */
static int link_open(int fd, const char *to) {
    char self[40];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    return linkat(AT_FDCWD, self, AT_FDCWD, to, AT_SYMLINK_FOLLOW);
}

/* In the target's directory: the file system then places inode and blocks as if the file were written there. */
static int open_nameless(const char *target) {
    char directory[PATH_MAX];
    const char *slash = strrchr(target, '/');
    size_t length = slash ? (size_t)(slash - target) : 0;
    if (!length || length >= sizeof directory) return -1;
    memcpy(directory, target, length);
    directory[length] = 0;
    int fd = open(directory, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0 && errno == ENOENT && make_parents(target) == 0)
        fd = open(directory, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    return fd;
}

static int create_copy(const char *temporary, const char *target, int *named) {
    *named = 0;
    if (nameless) {
        int fd = open_nameless(target);
        if (fd >= 0) return fd;
        if (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL || errno == ENOSYS) nameless = 0;
    }
    *named = 1;
    return open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
}

static int give_name(int fd, int named, const char *temporary, const char *target) {
    return named ? move_once(temporary, target) : link_open(fd, target);
}

/* -1, with errno EEXIST if something has the name. `second`: another name that it gets first, or NULL. */
static int publish_copy(int fd, int named, const char *temporary, const char *target, const char *second) {
    if (second && (named ? link(temporary, second) : link_open(fd, second)) < 0) {
        if (errno == EEXIST) errno = EIO;
        return -1;
    }
    int moved = give_name(fd, named, temporary, target);
    if (moved < 0 && errno == ENOENT && make_parents(target) == 0) moved = give_name(fd, named, temporary, target);
    if (moved == 0) return 0;
    int error = errno;
    if (second) unlink(second);
    errno = error;
    return -1;
}

static int write_all(int fd, const char *data, size_t length) {
    while (length) {
        ssize_t n = write(fd, data, length);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return -1;
        data += n;
        length -= (size_t)n;
    }
    return 0;
}

/* The time of last access becomes that of modification: a later one tells that a program has read the copy. */
static int stamp_copy(int fd, unsigned int mode, struct timespec mtime) {
    struct timespec times[2] = {mtime, mtime};
    return fchmod(fd, mode & 0777) < 0 || futimens(fd, times) < 0 ? -1 : 0;
}

#endif
