/* Takes the time of reads of 4 KiB from two files in turns. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define READ_BYTES 4096
#define READS 250 /* of a block: within the first stripe */
#define MOST_BLOCKS 10000

static char into[READ_BYTES];

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* 0: pread, 1: preadv, 2: read, 3: readv */
static ssize_t read_one(int fd, int call, off_t at) {
    struct iovec part = {into, READ_BYTES};
    return call == 0 ? pread(fd, into, READ_BYTES, at) : call == 1 ? preadv(fd, &part, 1, at)
           : call == 2 ? read(fd, into, READ_BYTES) : readv(fd, &part, 1);
}

/* Returns the ns that a read takes, -1 where one was short. */
static double block(int fd, int call) {
    int short_reads = 0;
    lseek(fd, 0, SEEK_SET);
    double begin = now_ns();
    for (int i = 0; i < READS; i++)
        short_reads += read_one(fd, call, (off_t)i * READ_BYTES) != READ_BYTES;
    return short_reads ? -1 : (now_ns() - begin) / READS;
}

/* Writes the medians of both files to `medians`. Returns whether all reads were whole. */
int measure(int call, int first, int second, int blocks, double *medians) {
    static double found[2][MOST_BLOCKS];
    for (int i = 0; i < blocks && i < MOST_BLOCKS; i++) {
        found[0][i] = block(first, call);
        found[1][i] = block(second, call);
        if (found[0][i] < 0 || found[1][i] < 0)
            return 0;
    }
    for (int file = 0; file < 2; file++) {
        qsort(found[file], (size_t)blocks, sizeof(double), compare);
        medians[file] = found[file][blocks / 2];
    }
    return 1;
}
