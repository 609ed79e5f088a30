/* Stands for a quota: writes below $QUOTA_DIRECTORY beyond $QUOTA_BYTES in all fail with EDQUOT. To be preloaded. What
 * is counted is what lies there, as a file system counts it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static __thread long long total;

static int add(const char *path, const struct stat *status, int kind, struct FTW *at)
{
    (void)path;
    (void)at;
    if (kind == FTW_F)
        total += status->st_size;
    return 0;
}

static int is_over(int fd, size_t count)
{
    const char *directory = getenv("QUOTA_DIRECTORY"), *most = getenv("QUOTA_BYTES");
    char link[64], path[4096];
    ssize_t length;
    if (!directory || !most)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length <= 0)
        return 0;
    path[length] = 0;
    if (strncmp(path, directory, strlen(directory)) || path[strlen(directory)] != '/')
        return 0;
    total = 0;
    nftw(directory, add, 16, FTW_PHYS);
    return total + (long long)count > atoll(most);
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at)
{
    static ssize_t (*next)(int, const void *, size_t, off64_t);
    if (!next)
        next = (ssize_t(*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    if (is_over(fd, count)) {
        errno = EDQUOT;
        return -1;
    }
    return next(fd, data, count, at);
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t at)
{
    return pwrite64(fd, data, count, at);
}
