/*
 * flatout: reads files with as many threads as it is told, as fast as it can. What the storage gives to a C program.
 *
 * Usage: flatout [-t THREADS] [-r REQUEST_BYTES] [-d] [-l] LIST
 *   LIST   a file of NUL-separated paths, each read once from its beginning to its end
 *   -d     O_DIRECT: past the page cache
 *   -l     over and over until a signal ends it: a competing load
 * Prints one line of JSON: files, bytes, seconds, failed.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define ALIGNMENT 4096

static struct {
    int threads, direct, loop;
    size_t request;
} conf = {.threads = 32, .request = 1 << 20};

static char **paths;
static long count;
static atomic_long next, bytes, failed;

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void read_one(const char *path, char *buffer)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | (conf.direct ? O_DIRECT : 0));
    ssize_t n = 0;

    if (fd < 0) {
        failed++;
        return;
    }
    while ((n = read(fd, buffer, conf.request)) > 0)
        bytes += n;
    if (n < 0)
        failed++;
    close(fd);
}

static void *worker(void *unused)
{
    char *buffer = aligned_alloc(ALIGNMENT, conf.request);
    long i;

    (void)unused;
    if (!buffer)
        abort();
    while ((i = next++) < count || conf.loop)
        read_one(paths[i % count], buffer);
    free(buffer);
    return NULL;
}

static int load_list(const char *name)
{
    struct stat s;
    char *text;
    int fd = open(name, O_RDONLY | O_CLOEXEC);

    if (fd < 0 || fstat(fd, &s) || !(text = malloc((size_t)s.st_size + 1)) || read(fd, text, (size_t)s.st_size) != s.st_size)
        return -1;
    close(fd);
    text[s.st_size] = 0;
    paths = malloc(sizeof *paths * ((size_t)s.st_size / 2 + 1));
    if (!paths)
        return -1;
    for (char *p = text; p < text + s.st_size; p += strlen(p) + 1)
        paths[count++] = p;
    return count ? 0 : -1;
}

static int parse(int argc, char **argv)
{
    int option;

    while ((option = getopt(argc, argv, "t:r:dl")) != -1) {
        switch (option) {
        case 't': conf.threads = atoi(optarg); break;
        case 'r': conf.request = strtoul(optarg, NULL, 10) / ALIGNMENT * ALIGNMENT; break;
        case 'd': conf.direct = 1; break;
        case 'l': conf.loop = 1; break;
        default: return -1;
        }
    }
    return argc - optind == 1 && conf.threads > 0 && conf.request > 0 ? 0 : -1;
}

int main(int argc, char **argv)
{
    pthread_t *threads;
    double start;

    if (parse(argc, argv)) {
        fprintf(stderr, "usage: flatout [-t THREADS] [-r REQUEST_BYTES] [-d] [-l] LIST\n");
        return 2;
    }
    if (load_list(argv[optind])) {
        perror(argv[optind]);
        return 1;
    }
    if (conf.loop) /* a load ends with whoever started it */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    threads = calloc((size_t)conf.threads, sizeof *threads);
    start = now_s();
    for (int i = 0; i < conf.threads; i++)
        if (pthread_create(&threads[i], NULL, worker, NULL))
            return 1;
    for (int i = 0; i < conf.threads; i++)
        pthread_join(threads[i], NULL);
    printf("{\"files\": %ld, \"bytes\": %ld, \"seconds\": %.6f, \"failed\": %ld}\n", count, (long)bytes,
           now_s() - start, (long)failed);
    return failed ? 1 : 0;
}
