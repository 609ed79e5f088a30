/* Copies one file without the interpreter lock: 32 threads of one process then cost what a C program costs.
 *
 * Owns the whole way of one file: open, read, write under a temporary name, check that the source stayed as it was,
 * publish under the final name without replacing anything. copyfile.py has the same steps in Python and the meaning of the
 * statuses; counters.py has the layout of a thread's counters. Limited API, so one build serves every Python.
 *
 * Threads at the source are counted: what fits into a buffer is read, checked and closed before the first byte is
 * written, and meanwhile another thread opens the next file. So the source always has as many requests as it may have.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "_publish.h"

#define BUFFER_BYTES (1 << 20)
#define DROP_BYTES (1 << 20)
#define SECOND_NS 1000000000ll
#define TICK_NS 20000000ll
#define MOST_TICKS 3
#define HIST_BUCKETS 96

enum { OK, SOURCE_ERROR, LOCAL_ERROR, CHANGED, NOT_REGULAR, TOO_LARGE, CANCELLED, EXISTS };

struct stats {
    uint64_t bytes, opens, open_ns, reads, read_ns, write_ns, files, cancel, current, current_bytes, reserved[6];
    uint32_t hist_open[HIST_BUCKETS], hist_read[HIST_BUCKETS];
};

struct facts {
    int64_t size, blocks;
    uint32_t mode;
    struct timespec mtime, ctime;
};

struct job {
    const char *source, *temporary, *target, *link;
    int64_t limit;
    int nofollow, urgent, named;
    volatile struct stats *stats;
    int status, error;
    uint64_t read_ns;
    struct facts before;
};

static __thread char *buffer;
static volatile int noatime = O_NOATIME;

/* First come, first served: with a semaphore a thread can wait for a second while others go past it. */
struct waiter {
    struct waiter *next;
    pthread_cond_t wake;
    int may_go;
};

static struct {
    pthread_mutex_t lock;
    struct waiter *first, **end;
    unsigned int free, waiting;
    int limited;
} turns = {.lock = PTHREAD_MUTEX_INITIALIZER, .end = &turns.first};

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int bucket_of_ns(uint64_t ns) {
    if (ns < 1024) return 0;
    int top = 63 - __builtin_clzll(ns);
    int bucket = 1 + 4 * (top - 10) + (int)(ns >> (top - 2) & 3);
    return bucket < HIST_BUCKETS ? bucket : HIST_BUCKETS - 1;
}

/* With the lock held. What is urgent goes before all others. */
static void wait_for_turn(int urgent) {
    struct waiter me = {.wake = PTHREAD_COND_INITIALIZER};
    struct waiter **place = urgent ? &turns.first : turns.end;
    me.next = *place;
    *place = &me;
    if (turns.end == place) turns.end = &me.next;
    turns.waiting++;
    while (!me.may_go) pthread_cond_wait(&me.wake, &turns.lock);
    turns.waiting--;
    pthread_cond_destroy(&me.wake);
}

static void take_turn(int urgent) {
    pthread_mutex_lock(&turns.lock);
    if (turns.free) turns.free--;
    else if (turns.limited) wait_for_turn(urgent);
    pthread_mutex_unlock(&turns.lock);
}

static void give_turn(void) {
    pthread_mutex_lock(&turns.lock);
    struct waiter *next = turns.first;
    if (next) {
        turns.first = next->next;
        if (!turns.first) turns.end = &turns.first;
        next->may_go = 1;
        pthread_cond_signal(&next->wake); /* with the lock held: it is gone once it has seen that it may go */
    } else if (turns.limited) {
        turns.free++;
    }
    pthread_mutex_unlock(&turns.lock);
}

static int fail(struct job *job, int status) {
    job->status = status;
    job->error = errno;
    return -1;
}

/* Without the access time, which every read makes unknown: asking for it costs a request to the source. */
static int get_facts(int fd, struct facts *facts) {
    struct statx x;
    unsigned asked = STATX_TYPE | STATX_MODE | STATX_SIZE | STATX_BLOCKS | STATX_MTIME | STATX_CTIME;
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, asked, &x) == 0) { /* glibc has it from 2.28 on only */
        facts->size = (int64_t)x.stx_size;
        facts->blocks = (int64_t)x.stx_blocks;
        facts->mode = x.stx_mode;
        facts->mtime = (struct timespec){x.stx_mtime.tv_sec, x.stx_mtime.tv_nsec};
        facts->ctime = (struct timespec){x.stx_ctime.tv_sec, x.stx_ctime.tv_nsec};
        return 0;
    }
    struct stat st;
    if ((errno != ENOSYS && errno != EPERM) || fstat(fd, &st) < 0) return -1;
    *facts = (struct facts){st.st_size, st.st_blocks, st.st_mode, st.st_mtim, st.st_ctim};
    return 0;
}

static int open_source(struct job *job) {
    int flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY | (job->nofollow ? O_NOFOLLOW : 0);
    int asked = noatime;  /* another thread may take it back in between */
    uint64_t start = now_ns();
    int fd = open(job->source, flags | asked);
    if (fd < 0 && errno == EPERM && asked) {
        noatime = 0;
        fd = open(job->source, flags);
    }
    uint64_t took = now_ns() - start;
    job->stats->opens++;
    job->stats->open_ns += took;
    job->stats->hist_open[bucket_of_ns(took)]++;
    return fd;
}

static ssize_t read_some(struct job *job, int fd, char *into, size_t wanted) {
    uint64_t start = now_ns();
    ssize_t n;
    do n = read(fd, into, wanted);
    while (n < 0 && errno == EINTR);
    uint64_t took = now_ns() - start;
    job->read_ns += took;
    job->stats->read_ns += took;
    job->stats->reads++;
    job->stats->hist_read[bucket_of_ns(took)]++;
    if (n > 0) {
        job->stats->bytes += (uint64_t)n;
        job->stats->current_bytes += (uint64_t)n;
    }
    return n;
}

static ssize_t read_next(struct job *job, int in, char *into, size_t wanted) {
    if (job->stats->cancel) return fail(job, CANCELLED);
    ssize_t n = read_some(job, in, into, wanted);
    if (n < 0) return fail(job, SOURCE_ERROR);
    return n ? n : fail(job, CHANGED);
}

static int read_whole(struct job *job, int in) {
    size_t length = (size_t)job->before.size, have = 0;
    while (have < length) {
        ssize_t n = read_next(job, in, buffer + have, length - have);
        if (n < 0) return -1;
        have += (size_t)n;
    }
    return 0;
}

static int write_whole(struct job *job, int out) {
    return write_all(out, buffer, (size_t)job->before.size) < 0 ? fail(job, LOCAL_ERROR) : 0;
}

/* Goes on in both files with the next bytes that are in no hole. Returns how many bytes are left from there on, or -1. */
static int64_t skip_hole(const struct job *job, int in, int out, int64_t left) {
    int64_t size = job->before.size, data = lseek(in, size - left, SEEK_DATA);
    if (data < 0) data = errno == ENXIO ? size : size - left;
    if (data > size) data = size;
    return lseek(out, data, SEEK_SET) < 0 ? -1 : size - data;
}

static int pump(struct job *job, int in, int out) {
    int64_t left = job->before.size;
    int sparse = job->before.blocks * 512 < left;
    if (sparse && ftruncate(out, left) < 0) return fail(job, LOCAL_ERROR);
    while (left > 0) {
        if (sparse && (left = skip_hole(job, in, out, left)) <= 0) break;
        ssize_t n = read_next(job, in, buffer, left < BUFFER_BYTES ? (size_t)left : BUFFER_BYTES);
        if (n < 0) return -1;
        if (write_all(out, buffer, (size_t)n) < 0) return fail(job, LOCAL_ERROR);
        left -= n;
    }
    return left < 0 ? fail(job, LOCAL_ERROR) : 0;
}

static int unchanged(const struct facts *a, const struct facts *b) {
    return a->size == b->size && a->mtime.tv_sec == b->mtime.tv_sec && a->mtime.tv_nsec == b->mtime.tv_nsec &&
           a->ctime.tv_sec == b->ctime.tv_sec && a->ctime.tv_nsec == b->ctime.tv_nsec;
}

static int publish(struct job *job, int out) {
    if (publish_copy(out, job->named, job->temporary, job->target, job->link) == 0) return 0;
    return fail(job, errno == EEXIST ? EXISTS : LOCAL_ERROR);
}

static int check(struct job *job, int in) {
    struct facts after;
    if (get_facts(in, &after) < 0) return fail(job, SOURCE_ERROR);
    if (!unchanged(&job->before, &after)) return fail(job, CHANGED);
    if (after.size >= DROP_BYTES) posix_fadvise(in, 0, 0, POSIX_FADV_DONTNEED);
    return 0;
}

static int stamp(struct job *job, int out) {
    return stamp_copy(out, job->before.mode, job->before.mtime) < 0 ? fail(job, LOCAL_ERROR) : 0;
}

/* in: still to be read, or -1: the whole file is in the buffer. */
static int copy_out(struct job *job, int in) {
    uint64_t start = now_ns(), read_before = job->read_ns;
    int out = create_copy(job->temporary, job->target, &job->named);
    if (out < 0) return fail(job, LOCAL_ERROR);
    int result = in < 0 ? write_whole(job, out) : pump(job, in, out);
    if (result == 0 && in >= 0) result = check(job, in);
    if (result == 0) result = stamp(job, out);
    if (job->named && close(out) < 0 && result == 0) result = fail(job, LOCAL_ERROR);
    if (result == 0) result = publish(job, out);
    if (!job->named) close(out);
    else if (result < 0) unlink(job->temporary);
    job->stats->write_ns += now_ns() - start - (job->read_ns - read_before);
    return result;
}

/* Whether the file changed within the last tick of the clock from which it has its times: another change within it would
 * leave them as they are. Waits for the next one. */
static int was_young(const struct facts *facts) {
    int64_t tick_ns = facts->ctime.tv_nsec ? TICK_NS : SECOND_NS + TICK_NS;
    struct timespec now, wait = {tick_ns / SECOND_NS, tick_ns % SECOND_NS};
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t s = (int64_t)now.tv_sec - facts->ctime.tv_sec;
    if (s < -2 || s > 2 || llabs(s * SECOND_NS + now.tv_nsec - facts->ctime.tv_nsec) > tick_ns) return 0;
    nanosleep(&wait, NULL);
    return 1;
}

static int look(struct job *job, int in) {
    int tries = MOST_TICKS;
    do {
        if (!tries--) return fail(job, CHANGED);
        if (get_facts(in, &job->before) < 0) return fail(job, SOURCE_ERROR);
    } while (S_ISREG(job->before.mode) && was_young(&job->before));
    if (!S_ISREG(job->before.mode)) return fail(job, NOT_REGULAR);
    return job->before.size > job->limit ? fail(job, TOO_LARGE) : 0;
}

static void copy_file(struct job *job) {
    if (!buffer && !(buffer = malloc(BUFFER_BYTES))) {
        errno = ENOMEM;
        fail(job, LOCAL_ERROR);
        return;
    }
    take_turn(job->urgent);
    int in = open_source(job);
    int result = in < 0 ? fail(job, SOURCE_ERROR) : look(job, in);
    if (result == 0 && job->before.size <= BUFFER_BYTES) {
        result = read_whole(job, in) || check(job, in) ? -1 : 0;
        close(in);
        in = -1;
        give_turn();
        if (result == 0) result = copy_out(job, -1);
    } else {
        if (result == 0) result = copy_out(job, in);
        if (in >= 0) close(in);
        give_turn();
    }
    if (result == 0) job->stats->files++;
}

static PyObject *py_copy(PyObject *self, PyObject *args) {
    (void)self;
    struct job job = {0};
    long long limit;
    unsigned long long stats;
    Py_ssize_t link_length;
    if (!PyArg_ParseTuple(args, "yyyz#ppLK", &job.source, &job.temporary, &job.target, &job.link, &link_length,
                          &job.nofollow, &job.urgent, &limit, &stats))
        return NULL;
    job.limit = limit;
    job.stats = (volatile struct stats *)(uintptr_t)stats;
    Py_BEGIN_ALLOW_THREADS
    copy_file(&job);
    Py_END_ALLOW_THREADS
    long long mtime_ns = (long long)job.before.mtime.tv_sec * 1000000000 + job.before.mtime.tv_nsec;
    return Py_BuildValue("iiLL", job.status, job.status ? job.error : 0, (long long)job.before.size, mtime_ns);
}

static PyObject *py_limit(PyObject *self, PyObject *args) {
    unsigned int threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "I", &threads)) return NULL;
    turns.free = threads;
    turns.limited = 1;
    Py_RETURN_NONE;
}

static PyObject *py_take_turn(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    Py_BEGIN_ALLOW_THREADS
    take_turn(0);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_give_turn(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    give_turn();
    Py_RETURN_NONE;
}

static PyObject *py_waiting(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    pthread_mutex_lock(&turns.lock);
    unsigned int waiting = turns.waiting;
    pthread_mutex_unlock(&turns.lock);
    return PyLong_FromUnsignedLong(waiting);
}

static PyMethodDef methods[] = {
    {"copy", py_copy, METH_VARARGS,
     "copy(source, temporary, target, link, nofollow, urgent, limit, stats) -> (status, errno, size, mtime_ns)"},
    {"limit", py_limit, METH_VARARGS, "limit(threads): so many may be at the source at a time; call it before any is"},
    {"take_turn", py_take_turn, METH_NOARGS, "Waits until another thread may go to the source."},
    {"give_turn", py_give_turn, METH_NOARGS, "This thread is back."},
    {"waiting", py_waiting, METH_NOARGS, "How many threads wait for a turn."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy", "Copies files without the interpreter lock.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void) {
    nameless = access("/proc/self/fd", X_OK) == 0;
    return PyModule_Create(&module);
}
