/* Reads a file in the ways that C knows, and writes a line for each of them: what was asked, what came, where the
 * offset is then. Two runs are alike if all of their lines are. */
#define _GNU_SOURCE
#include <aio.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MB (1 << 20)
#define ROOM (6 * MB)

static FILE *out;
static const char *path, *scratch;
static unsigned char *room;

static void tell(const char *what, long long asked, long long got, int number, const void *data, long long at) {
    uint64_t sum = 14695981039346656037u;
    for (long long i = 0; data && i < got; i++)
        sum = (sum ^ ((const unsigned char *)data)[i]) * 1099511628211u;
    fprintf(out, "%s %lld: %lld, error %d, bytes %016llx, offset %lld\n", what, asked, got, got < 0 ? number : 0,
            (unsigned long long)sum, at);
}
#define TELL(what, asked, call, data, fd) \
    do { \
        memset(room, '-', 64); \
        errno = 0; \
        long long got_ = (long long)(call); \
        int number_ = errno; \
        tell(what, asked, got_, number_, data, (long long)lseek(fd, 0, SEEK_CUR)); \
    } while (0)

static int begin(int flags) {
    return open(path, O_RDONLY | O_CLOEXEC | flags);
}

static const struct {
    off_t at;
    size_t n;
} ranges[] = {{0, 100}, {MB - 1000, 2000}, {MB, MB}, {2 * MB + 5, MB - 5}, {3 * MB - 1, 2}, {4 * MB + 900, 1000},
              {4 * MB, 5000}, {4 * MB + 1000, 10}, {9 * MB, 10}, {5, 0}, {0, 5 * MB}, {2 * MB, 3 * MB}};
#define RANGES (sizeof ranges / sizeof *ranges)

static void calls(int flags, const char *which) {
    int fd = begin(flags);
    fprintf(out, "-- %s\n", which);
    for (size_t i = 0; fd >= 0 && i < RANGES; i++) {
        off_t at = ranges[i].at;
        size_t n = ranges[i].n, half = n / 2;
        struct iovec two[2] = {{room, half}, {room + half, n - half}};
        TELL("pread", at, pread(fd, room, n, at), room, fd);
        TELL("preadv", at, preadv(fd, two, 2, at), room, fd);
        TELL("preadv2", at, preadv2(fd, two, 2, at, 0), room, fd);
        TELL("preadv2, high priority", at, preadv2(fd, two, 2, at, RWF_HIPRI), room, fd);
        lseek(fd, at, SEEK_SET);
        TELL("read", at, read(fd, room, n), room, fd);
        TELL("read on", at, read(fd, room, 1000), room, fd);
        lseek(fd, at, SEEK_SET);
        TELL("readv", at, readv(fd, two, 2), room, fd);
        TELL("preadv2 at the offset", at, preadv2(fd, two, 2, -1, 0), room, fd);
        TELL("readahead", at, readahead(fd, at, n), NULL, fd);
        TELL("fadvise", at, posix_fadvise(fd, at, (off_t)n, POSIX_FADV_WILLNEED), NULL, fd);
        TELL("pread", at, pread(fd, room, n, at), room, fd);
    }
    if (fd >= 0)
        close(fd);
}

static void wrong(void) {
    int fd = begin(0);
    long page = sysconf(_SC_PAGESIZE);
    unsigned char *edge = mmap(NULL, (size_t)(2 * page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(edge + page, (size_t)page, PROT_NONE);
    struct iovec *nowhere = (struct iovec *)(edge + page), part = {room, 10};
    static struct iovec many[2000];
    for (int i = 0; i < 2000; i++)
        many[i] = (struct iovec){room + i, 1};
    struct iovec second[2] = {{room, 10}, {edge + page, 10}}, empty[3] = {{edge + page, 0}, {room, 20}, {NULL, 0}};
    struct iovec huge[2] = {{room, SSIZE_MAX}, {room, 10}};
    fprintf(out, "-- wrong\n");
    TELL("prime", 0, pread(fd, room, 10, 0), room, fd);
    TELL("read to nowhere", 0, read(fd, edge + page, 10), NULL, fd);
    TELL("pread to nowhere", 0, pread(fd, edge + page, 10, 0), NULL, fd);
    TELL("pread to NULL", 0, pread(fd, NULL, 10, 0), NULL, fd);
    TELL("read over an edge", 0, read(fd, edge + page - 50, 100), edge + page - 50, fd);
    TELL("pread over an edge", 0, pread(fd, edge + page - 50, 100, 40), edge + page - 50, fd);
    TELL("nothing to nowhere", 0, read(fd, edge + page, 0), NULL, fd);
    TELL("readv, second nowhere", 0, readv(fd, second, 2), room, fd);
    TELL("preadv, second nowhere", 0, preadv(fd, second, 2, 5), room, fd);
    TELL("readv of empty parts", 0, readv(fd, empty, 3), room, fd);
    TELL("readv by a wrong list", 0, readv(fd, nowhere, 2), NULL, fd);
    TELL("preadv by a wrong list", 0, preadv(fd, nowhere, 2, 0), NULL, fd);
    TELL("preadv2 by a wrong list", 0, preadv2(fd, nowhere, 1, 0, 0), NULL, fd);
    TELL("preadv2 by a wrong list, at the offset", 0, preadv2(fd, nowhere, 1, -1, 0), NULL, fd);
    TELL("readv by no list", 0, readv(fd, NULL, 1), NULL, fd);
    TELL("readv of less than nothing", 0, readv(fd, &part, -1), NULL, fd);
    TELL("readv of nothing", 0, readv(fd, &part, 0), NULL, fd);
    TELL("readv of 1024", 0, readv(fd, many, 1024), room, fd);
    TELL("readv of 1025", 0, readv(fd, many, 1025), NULL, fd);
    TELL("readv of too much", 0, readv(fd, huge, 2), NULL, fd);
    TELL("read of too much", 0, read(fd, room, (size_t)SSIZE_MAX + 1), NULL, fd);
    TELL("pread before the beginning", 0, pread(fd, room, 10, -5), NULL, fd);
    TELL("preadv2 before the beginning", 0, preadv2(fd, &part, 1, -5, 0), NULL, fd);
    TELL("pread far out", 0, pread(fd, room, 10, INT64_MAX - 5), NULL, fd);
    TELL("read", 0, read(fd, room, 10), room, fd);
    munmap(edge, (size_t)(2 * page));
    close(fd);
    fd = begin(O_PATH);
    TELL("read of a path", 0, read(fd, room, 10), NULL, fd);
    close(fd);
    TELL("read of a closed one", 0, read(fd, room, 10), NULL, fd);
}

static void streams(const char *mode) {
    FILE *file = fopen(path, mode);
    char *line = NULL;
    size_t held = 0;
    fprintf(out, "-- streams %s\n", mode);
    for (size_t i = 0; i < RANGES; i++) {
        off_t at = ranges[i].at;
        fseeko(file, at, SEEK_SET);
        TELL("fread", at, fread(room, 1, ranges[i].n, file), room, fileno(file));
        fprintf(out, "at %lld, end %d\n", (long long)ftello(file), feof(file));
        fseeko(file, at, SEEK_SET);
        ssize_t got = getline(&line, &held, file);
        tell("getline", at, got, errno, line, ftello(file));
        got = getdelim(&line, &held, '7', file);
        tell("getdelim", at, got, errno, line, ftello(file));
        memset(room, 0, 300);
        tell("fgets", at, fgets((char *)room, 300, file) ? 300 : 0, 0, room, ftello(file));
        int first = getc(file);
        ungetc(first, file);
        fprintf(out, "getc %d, %d, at %lld\n", first, getc(file), (long long)ftello(file));
        fflush(file);
        TELL("read behind the stream", at, read(fileno(file), room, 100), room, fileno(file));
        tell("fread on", at, (long long)fread(room, 1, 100, file), 0, room, ftello(file));
    }
    free(line);
    fclose(file);
    int fd = begin(0);
    TELL("read", 0, read(fd, room, MB + 100), room, fd);
    file = fdopen(fd, "rb");
    setvbuf(file, NULL, _IOFBF, 70000);
    TELL("fread of fdopen", 0, fread(room, 1, 3 * MB, file), room, fd);
    fclose(file);
}

static void between(void) {
    int fd = begin(0), pipes[2], to = open(scratch, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (pipe(pipes) != 0)
        return;
    fprintf(out, "-- between descriptors\n");
    for (size_t i = 0; i < RANGES; i++) {
        size_t few = ranges[i].n < 4000 ? ranges[i].n : 4000;
        off_t at = ranges[i].at, own = at;
        TELL("pread", at, pread(fd, room, 100, at), room, fd);
        ssize_t got = sendfile(pipes[1], fd, &own, few);
        tell("sendfile", at, got, errno, room, own);
        TELL("came", at, got > 0 ? read(pipes[0], room, (size_t)got) : 0, room, fd);
        lseek(fd, at, SEEK_SET);
        got = sendfile(to, fd, NULL, ranges[i].n);
        tell("sendfile at the offset", at, got, errno, NULL, lseek(fd, 0, SEEK_CUR));
        TELL("came", at, pread(to, room, got > 0 ? (size_t)got : 0, lseek(to, 0, SEEK_CUR) - (got > 0 ? got : 0)), room, to);
        own = at;
        got = splice(fd, &own, pipes[1], NULL, few, 0);
        tell("splice", at, got, errno, NULL, own);
        TELL("came", at, got > 0 ? read(pipes[0], room, (size_t)got) : 0, room, fd);
        own = at;
        got = copy_file_range(fd, &own, to, NULL, ranges[i].n, 0);
        tell("copy_file_range", at, got < 0 ? -1 : got, errno, NULL, own);
        TELL("came", at, pread(to, room, got > 0 ? (size_t)got : 0, lseek(to, 0, SEEK_CUR) - (got > 0 ? got : 0)), room, to);
        lseek(fd, at, SEEK_SET);
        got = copy_file_range(fd, NULL, to, NULL, few, 0);
        tell("copy_file_range at the offset", at, got < 0 ? -1 : got, errno, NULL, lseek(fd, 0, SEEK_CUR));
        struct aiocb asked = {.aio_fildes = fd, .aio_buf = room, .aio_nbytes = ranges[i].n, .aio_offset = at};
        const struct aiocb *list[1] = {&asked};
        memset(room, '-', 64);
        aio_read(&asked);
        while (aio_error(&asked) == EINPROGRESS)
            aio_suspend(list, 1, NULL);
        got = aio_return(&asked);
        tell("aio_read", at, got, 0, room, lseek(fd, 0, SEEK_CUR));
    }
    close(pipes[0]);
    close(pipes[1]);
    close(to);
    close(fd);
}

static void maps(void) {
    int fd = begin(0);
    fprintf(out, "-- mappings\n");
    for (int how = 0; how < 3; how++)
        for (off_t at = 0; at < 4 * MB; at += MB / 2) {
            int flags = how == 0 ? MAP_SHARED : how == 1 ? MAP_PRIVATE : MAP_PRIVATE | MAP_POPULATE;
            TELL("pread", at, pread(fd, room, 100, at), room, fd);
            unsigned char *mapped = mmap(NULL, MB, PROT_READ | (how == 1 ? PROT_WRITE : 0), flags, fd, at);
            madvise(mapped, MB, MADV_WILLNEED);
            tell("mmap", at, MB / 2, errno, mapped, lseek(fd, 0, SEEK_CUR));
            munmap(mapped, MB);
        }
    close(fd);
}

static void shared(void) {
    int fd = begin(0), other = dup(fd), third = fcntl(fd, F_DUPFD_CLOEXEC, 50);
    char name[64];
    fprintf(out, "-- shared\n");
    for (int turn = 0; turn < 40; turn++) {
        TELL("read", turn, read(fd, room, 30000), room, other);
        TELL("read of a dup", turn, read(other, room, 30000), room, third);
        TELL("read of another", turn, read(third, room, 30000), room, fd);
        fflush(out);
        pid_t child = fork();
        if (!child)
            _exit(read(fd, room, 12345) == 12345 && pread(other, room, 10, 10) == 10 ? 0 : 1);
        int status = 0;
        waitpid(child, &status, 0);
        tell("child", turn, status, 0, NULL, lseek(fd, 0, SEEK_CUR));
    }
    dup2(other, 60);
    close(other);
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int again = open(name, O_RDONLY);
    TELL("read of dup2", 0, read(60, room, 100), room, fd);
    TELL("read of what was opened by number", 0, read(again, room, 100), room, again);
    TELL("seek to data", 0, lseek(fd, 100, SEEK_DATA), NULL, fd);
    TELL("seek from the end", 0, lseek(fd, -100, SEEK_END), NULL, fd);
    TELL("read to the end", 0, read(fd, room, 1000), room, fd);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    TELL("pread that would not block", 0, pread(fd, room, 1000, 50), room, fd);
    close(60);
    close(third);
    close(again);
    close(fd);
}

static int handled_fd;
static volatile sig_atomic_t handled, wrong_in_handler;
static char expected_in_handler[64];

static void handler(int number) {
    char found[64];
    int saved = errno;
    (void)number;
    if (pread(handled_fd, found, sizeof found, 2 * MB + 7) != sizeof found || memcmp(found, expected_in_handler, 64) != 0)
        wrong_in_handler = 1;
    handled++;
    errno = saved;
}

static void interrupted(void) {
    struct sigaction action = {.sa_handler = handler}, before;
    struct itimerval often = {{0, 500}, {0, 500}}, never = {{0, 0}, {0, 0}};
    int fd = begin(0);
    fprintf(out, "-- interrupted\n");
    handled_fd = fd;
    pread(fd, expected_in_handler, 64, 2 * MB + 7);
    sigaction(SIGALRM, &action, &before);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int turn = 0; turn < 400 || handled < 20; turn++) {
        off_t at = (off_t)(turn % 40) * 100001;
        ssize_t got = pread(fd, room, 50000, at);
        lseek(fd, at, SEEK_SET);
        ssize_t next = read(fd, room + 50000, 50000);
        if (turn < 400)
            tell("reads", at, got < 0 || next < 0 ? -1 : got + next, errno, room, lseek(fd, 0, SEEK_CUR));
    }
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &before, NULL);
    fprintf(out, "wrong in the handler: %d\n", (int)wrong_in_handler);
    close(fd);
}

struct endless {
    int fd, way;
    unsigned char *into;
};

static void *reads_on(void *given) {
    const struct endless *e = given;
    struct iovec part = {e->into, 1000};
    for (unsigned at = 0;; at = (at + 1000) % MB)
        if (e->way == 0)
            pread(e->fd, e->into, 1000, at);
        else if (e->way == 1)
            preadv(e->fd, &part, 1, at);
        else if (read(e->fd, e->into, 1000) < 1000)
            lseek(e->fd, 0, SEEK_SET);
    return NULL;
}

static void cancelled(void) {
    fprintf(out, "-- cancelled\n");
    for (int way = 0; way < 3; way++) {
        struct endless e = {begin(0), way, room + way * 10000};
        pthread_t thread;
        void *result = NULL;
        struct timespec until, pause = {0, 5000000};
        pthread_create(&thread, NULL, reads_on, &e);
        nanosleep(&pause, NULL);
        pthread_cancel(thread);
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += 10;
        int ended = pthread_timedjoin_np(thread, &result, &until);
        fprintf(out, "way %d: %s, cancelled %d\n", way, strerror(ended), result == PTHREAD_CANCELED);
        if (ended == 0)
            close(e.fd);
    }
    int fd = begin(0), state = -1;
    TELL("read afterwards", 0, read(fd, room, 1000), room, fd);
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state);
    fprintf(out, "can be cancelled: %d\n", state == PTHREAD_CANCEL_ENABLE);
    close(fd);
}

void ways(const char *file, const char *temporary, const char *report) {
    path = file;
    scratch = temporary;
    out = fopen(report, "w");
    room = aligned_alloc(4096, ROOM);
    calls(0, "calls");
    calls(O_NONBLOCK, "calls that would not block");
    calls(O_DIRECT, "calls past the cache");
    wrong();
    streams("rb");
    streams("rbm");
    between();
    maps();
    shared();
    interrupted();
    cancelled();
    free(room);
    fclose(out);
}
