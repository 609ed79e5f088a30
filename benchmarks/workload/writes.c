/* Writes output files as a C program may: holes, maps, descriptors without a name, exchanged names, names below open
 * directories, locks, a child that inherits a descriptor. $OUT is the directory. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(long result, const char *what)
{
    if (result < 0) {
        perror(what);
        exit(1);
    }
}

int main(void)
{
    const char *out = getenv("OUT");
    int dir = open(out, O_RDONLY | O_DIRECTORY), fd, number;
    char text[4096], path[64], *map;
    check(dir, "OUT");

    /* holes */
    check(fd = openat(dir, "holes", O_RDWR | O_CREAT, 0644), "holes");
    check(pwrite(fd, "begin", 5, 0), "pwrite");
    check(pwrite(fd, "end", 3, 64 << 20), "pwrite");
    check(ftruncate(fd, (96 << 20) + 17), "ftruncate");
    close(fd);

    /* a map that outlives its descriptor */
    check(fd = openat(dir, "mapped", O_RDWR | O_CREAT, 0600), "mapped");
    check(ftruncate(fd, 1 << 20), "ftruncate");
    map = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        check(-1, "mmap");
    close(fd);
    usleep(400000);
    memset(map + 4000, 'm', 9000);
    check(munmap(map, 1 << 20), "munmap");

    /* a file that gets its name when it is complete */
    fd = openat(dir, ".", O_TMPFILE | O_WRONLY, 0640);
    if (fd < 0)
        check(fd = openat(dir, "unnamed", O_CREAT | O_WRONLY, 0640), "unnamed");
    memset(text, 't', sizeof text);
    for (number = 0; number < 100; number++)
        check(write(fd, text, sizeof text), "write");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (linkat(AT_FDCWD, path, dir, "unnamed", AT_SYMLINK_FOLLOW) < 0 && errno != EEXIST)
        check(-1, "linkat");
    close(fd);

    /* two names that are exchanged in one step, and a rename that must not replace */
    for (number = 0; number < 2; number++) {
        snprintf(path, sizeof path, "exchanged%d", number);
        check(fd = openat(dir, path, O_CREAT | O_WRONLY, 0644), "exchanged");
        check(write(fd, path, strlen(path)), "write");
        close(fd);
    }
    check(syscall(SYS_renameat2, dir, "exchanged0", dir, "exchanged1", 2), "renameat2");
    check(syscall(SYS_renameat2, dir, "exchanged0", dir, "fresh", 1), "renameat2");

    /* written by a child through an inherited descriptor, after a rename */
    check(fd = openat(dir, "inherited", O_CREAT | O_WRONLY | O_APPEND, 0644), "inherited");
    if (fork() == 0) {
        usleep(300000);
        write(fd, "child\n", 6);
        _exit(0);
    }
    check(write(fd, "parent\n", 7), "write");
    check(renameat(dir, "inherited", dir, "inherited.log"), "renameat");
    close(fd);
    wait(NULL);

    /* a file without a name, and a directory that is removed while it is open */
    check(fd = openat(dir, "anonymous", O_CREAT | O_RDWR, 0600), "anonymous");
    check(unlinkat(dir, "anonymous", 0), "unlinkat");
    check(write(fd, "nobody", 6), "write");
    close(fd);
    check(mkdirat(dir, "short", 0755), "mkdirat");
    check(unlinkat(dir, "short", AT_REMOVEDIR), "unlinkat");

    /* shortened and written again at the same length, within a tick of the clock */
    check(fd = openat(dir, "rewritten", O_CREAT | O_RDWR, 0644), "rewritten");
    for (number = 0; number < 1000; number++) {
        snprintf(text, sizeof text, "%06d", number);
        check(pwrite(fd, text, 6, 0), "pwrite");
    }
    check(fallocate(fd, 0, 0, 8192), "fallocate");
    check(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 4096), "punch");
    check(fchmod(fd, 0444), "fchmod");
    close(fd);
    return 0;
}
