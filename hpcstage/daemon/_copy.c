/* Copies one file without the interpreter lock: 32 threads of one process then cost what a C program costs.
 *
 * Owns the whole way of one file: open, read, write under a temporary name, check that the source stayed as it was,
 * publish under the final name without replacing anything. copyfile.py has the same in Python and the meaning of the
 * statuses; stats.py has the layout of a thread's counters. Limited API, so one build serves every Python.
 *
 * Threads at the source are counted: what fits into a buffer is read, checked and closed before the first byte is
 * written, and meanwhile another thread opens the next file. So the source always has as many requests as it may have.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BUFFER_BYTES (1 << 20)
#define DROP_BYTES (1 << 20)
#define HIST_BUCKETS 96
#ifndef RENAME_NOREPLACE
#define RENAME_NOREPLACE 1
#endif

enum { OK, SOURCE_ERROR, LOCAL_ERROR, CHANGED, NOT_REGULAR, TOO_LARGE, CANCELLED, EXISTS };

struct stats {
    uint64_t bytes, opens, open_ns, reads, read_ns, write_ns, files, cancel, reserved[8];
    uint32_t hist_open[HIST_BUCKETS], hist_read[HIST_BUCKETS];
};

struct facts {
    int64_t size;
    uint32_t mode;
    struct timespec mtime, ctime;
};

struct job {
    const char *source, *temporary, *target, *link;
    int64_t limit;
    int nofollow, named;
    volatile struct stats *stats;
    int status, error;
    uint64_t open_ns, read_ns, write_ns;
    struct facts before;
};

static __thread char *buffer;
static volatile int noatime = O_NOATIME;
static volatile int nameless = 1;
static sem_t turns;
static volatile int limited;

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

static void take_turn(void) {
    while (limited && sem_wait(&turns) < 0 && errno == EINTR)
        ;
}

static void give_turn(void) {
    if (limited) sem_post(&turns);
}

static int fail(struct job *job, int status) {
    job->status = status;
    job->error = errno;
    return -1;
}

/* Without the access time, which every read makes unknown: asking for it costs a request to the source. */
static int get_facts(int fd, struct facts *facts) {
    struct statx x;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_TYPE | STATX_MODE | STATX_SIZE | STATX_MTIME | STATX_CTIME, &x) == 0) {
        facts->size = (int64_t)x.stx_size;
        facts->mode = x.stx_mode;
        facts->mtime = (struct timespec){x.stx_mtime.tv_sec, x.stx_mtime.tv_nsec};
        facts->ctime = (struct timespec){x.stx_ctime.tv_sec, x.stx_ctime.tv_nsec};
        return 0;
    }
    struct stat st;
    if ((errno != ENOSYS && errno != EPERM) || fstat(fd, &st) < 0) return -1;
    *facts = (struct facts){st.st_size, st.st_mode, st.st_mtim, st.st_ctim};
    return 0;
}

static int open_source(struct job *job) {
    int flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY | (job->nofollow ? O_NOFOLLOW : 0);
    uint64_t start = now_ns();
    int fd = open(job->source, flags | noatime);
    if (fd < 0 && errno == EPERM && noatime) {
        noatime = 0;
        fd = open(job->source, flags);
    }
    job->open_ns = now_ns() - start;
    job->stats->opens++;
    job->stats->open_ns += job->open_ns;
    job->stats->hist_open[bucket_of_ns(job->open_ns)]++;
    return fd;
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
    if (n > 0) job->stats->bytes += (uint64_t)n;
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

static int pump(struct job *job, int in, int out) {
    int64_t left = job->before.size;
    while (left > 0) {
        ssize_t n = read_next(job, in, buffer, left < BUFFER_BYTES ? (size_t)left : BUFFER_BYTES);
        if (n < 0) return -1;
        uint64_t start = now_ns();
        int written = write_all(out, buffer, (size_t)n);
        job->write_ns += now_ns() - start;
        if (written < 0) return fail(job, LOCAL_ERROR);
        left -= n;
    }
    return 0;
}

static int unchanged(const struct facts *a, const struct facts *b) {
    return a->size == b->size && a->mtime.tv_sec == b->mtime.tv_sec && a->mtime.tv_nsec == b->mtime.tv_nsec &&
           a->ctime.tv_sec == b->ctime.tv_sec && a->ctime.tv_nsec == b->ctime.tv_nsec;
}

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

static int give_name(struct job *job, int out) {
    return job->named ? move_once(job->temporary, job->target) : link_open(out, job->target);
}

static int publish(struct job *job, int out) {
    if (job->link && (job->named ? link(job->temporary, job->link) : link_open(out, job->link)) < 0)
        return fail(job, LOCAL_ERROR);
    int moved = give_name(job, out);
    if (moved < 0 && errno == ENOENT && make_parents(job->target) == 0) moved = give_name(job, out);
    if (moved == 0) return 0;
    int error = errno;
    if (job->link) unlink(job->link);
    errno = error;
    return fail(job, error == EEXIST ? EXISTS : LOCAL_ERROR);
}

/* In the target's directory: the file system then places inode and blocks as if the file were written there. */
static int open_nameless(struct job *job) {
    char directory[PATH_MAX];
    const char *slash = strrchr(job->target, '/');
    size_t length = slash ? (size_t)(slash - job->target) : 0;
    if (!length || length >= sizeof directory) return -1;
    memcpy(directory, job->target, length);
    directory[length] = 0;
    int fd = open(directory, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    if (fd < 0 && errno == ENOENT && make_parents(job->target) == 0)
        fd = open(directory, O_TMPFILE | O_WRONLY | O_CLOEXEC, 0600);
    return fd;
}

static int create(struct job *job) {
    if (nameless) {
        int fd = open_nameless(job);
        if (fd >= 0) return fd;
        if (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL || errno == ENOSYS) nameless = 0;
    }
    job->named = 1;
    return open(job->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
}

static int check(struct job *job, int in) {
    struct facts after;
    if (get_facts(in, &after) < 0) return fail(job, SOURCE_ERROR);
    if (!unchanged(&job->before, &after)) return fail(job, CHANGED);
    if (after.size >= DROP_BYTES) posix_fadvise(in, 0, 0, POSIX_FADV_DONTNEED);
    return 0;
}

static int stamp(struct job *job, int out) {
    struct timespec times[2] = {{0, UTIME_OMIT}, job->before.mtime};
    return fchmod(out, job->before.mode & 0777) < 0 || futimens(out, times) < 0 ? fail(job, LOCAL_ERROR) : 0;
}

/* in: still to be read, or -1: the whole file is in the buffer. */
static int copy_out(struct job *job, int in) {
    uint64_t start = now_ns(), read_before = job->read_ns;
    int out = create(job);
    if (out < 0) return fail(job, LOCAL_ERROR);
    int result = in < 0 ? write_whole(job, out) : pump(job, in, out);
    if (result == 0 && in >= 0) result = check(job, in);
    if (result == 0) result = stamp(job, out);
    if (job->named && close(out) < 0 && result == 0) result = fail(job, LOCAL_ERROR);
    if (result == 0) result = publish(job, out);
    if (!job->named) close(out);
    else if (result < 0) unlink(job->temporary);
    job->write_ns = now_ns() - start - (job->read_ns - read_before);
    return result;
}

static int look(struct job *job, int in) {
    if (get_facts(in, &job->before) < 0) return fail(job, SOURCE_ERROR);
    if (!S_ISREG(job->before.mode)) return fail(job, NOT_REGULAR);
    return job->before.size > job->limit ? fail(job, TOO_LARGE) : 0;
}

static void copy_file(struct job *job) {
    if (!buffer && !(buffer = malloc(BUFFER_BYTES))) {
        errno = ENOMEM;
        fail(job, LOCAL_ERROR);
        return;
    }
    take_turn();
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
    job->stats->write_ns += job->write_ns;
}

static PyObject *py_copy(PyObject *self, PyObject *args) {
    (void)self;
    struct job job = {0};
    long long limit;
    unsigned long long stats;
    Py_ssize_t link_length;
    if (!PyArg_ParseTuple(args, "yyyz#pLK", &job.source, &job.temporary, &job.target, &job.link, &link_length,
                          &job.nofollow, &limit, &stats))
        return NULL;
    job.limit = limit;
    job.stats = (volatile struct stats *)(uintptr_t)stats;
    Py_BEGIN_ALLOW_THREADS
    copy_file(&job);
    Py_END_ALLOW_THREADS
    long long mtime_ns = (long long)job.before.mtime.tv_sec * 1000000000 + job.before.mtime.tv_nsec;
    return Py_BuildValue("iiLLKKK", job.status, job.status ? job.error : 0, (long long)job.before.size, mtime_ns,
                         (unsigned long long)job.open_ns, (unsigned long long)job.read_ns,
                         (unsigned long long)job.write_ns);
}

static PyObject *py_limit(PyObject *self, PyObject *args) {
    unsigned int threads;
    (void)self;
    if (!PyArg_ParseTuple(args, "I", &threads)) return NULL;
    limited = sem_init(&turns, 0, threads) == 0;
    Py_RETURN_NONE;
}

static PyObject *py_take_turn(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    Py_BEGIN_ALLOW_THREADS
    take_turn();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *py_give_turn(PyObject *self, PyObject *none) {
    (void)self;
    (void)none;
    give_turn();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"copy", py_copy, METH_VARARGS,
     "copy(source, temporary, target, link, nofollow, limit, stats) -> (status, errno, size, mtime_ns, open_ns, "
     "read_ns, write_ns)"},
    {"limit", py_limit, METH_VARARGS, "limit(threads): so many may be at the source at a time; call it before any is"},
    {"take_turn", py_take_turn, METH_NOARGS, "Waits until another thread may go to the source."},
    {"give_turn", py_give_turn, METH_NOARGS, "This thread is back."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy", "Copies files without the interpreter lock.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void) {
    nameless = access("/proc/self/fd", X_OK) == 0;
    return PyModule_Create(&module);
}
