/* Reads and writes many small files in one call, without the interpreter lock: what `files.py` does in Python.
 *
 * Files that a node gives lie one behind the other in a buffer; files that a node gets are published as copiers do.
 * Buffers are given by address; who calls keeps them alive. Limited API, so one build serves every Python.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x030a0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <sys/stat.h>
#include <time.h>

#include "_publish.h"

#define MOST 1024

enum { WHOLE, LOST, NO_ROOM };

struct given {
    const char *path;
    int status, error;
    uint64_t size, at;
    unsigned int mode;
    int64_t mtime_ns;
};

struct gotten {
    unsigned long long at, length;
    unsigned int mode;
    long long mtime_ns;
    const char *temporary, *target, *second;
    int error;
};

static int read_all(int fd, char *into, size_t length) {
    while (length) {
        ssize_t n = read(fd, into, length);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1;
        into += n;
        length -= (size_t)n;
    }
    return 0;
}

static int read_open(struct given *file, int fd, char *base, uint64_t at, uint64_t end) {
    struct stat found;
    if (fstat(fd, &found) < 0 || !S_ISREG(found.st_mode)) return LOST;
    file->at = at;
    file->size = (uint64_t)found.st_size;
    file->mode = found.st_mode & 0777;
    file->mtime_ns = (int64_t)found.st_mtim.tv_sec * 1000000000 + found.st_mtim.tv_nsec;
    if (file->size > end - at) return NO_ROOM;
    return read_all(fd, base + at, file->size) < 0 ? LOST : WHOLE;
}

/* How many were looked at: it ends with the first that finds no room. */
static int read_files(struct given *files, int count, char *base, uint64_t at, uint64_t end) {
    for (int i = 0; i < count; i++) {
        int fd = open(files[i].path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
        files[i].status = fd < 0 ? LOST : read_open(&files[i], fd, base, at, end);
        if (fd >= 0) close(fd);
        if (files[i].status == WHOLE) at += files[i].size;
        if (files[i].status == NO_ROOM) return i + 1;
    }
    return count;
}

static int write_open(const struct gotten *file, int fd, int named, const char *base) {
    struct timespec mtime = {file->mtime_ns / 1000000000, file->mtime_ns % 1000000000};
    if (mtime.tv_nsec < 0) {
        mtime.tv_sec--;
        mtime.tv_nsec += 1000000000;
    }
    if (write_all(fd, base + file->at, file->length) < 0) return -1;
    if (stamp_copy(fd, file->mode, mtime) < 0) return -1;
    return publish_copy(fd, named, file->temporary, file->target, file->second);
}

static void write_file(struct gotten *file, const char *base) {
    int named;
    int fd = create_copy(file->temporary, file->target, &named);
    if (fd < 0) {
        file->error = errno == EEXIST ? EIO : errno;
        return;
    }
    file->error = write_open(file, fd, named, base) < 0 ? errno : 0;
    if (close(fd) < 0 && !file->error) file->error = errno;
    if (file->error && named) unlink(file->temporary);
}

static PyObject *pack_given(const struct given *files, int count) {
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        const struct given *f = &files[i];
        PyObject *row = Py_BuildValue("iKILK", f->status, (unsigned long long)f->size, f->mode, (long long)f->mtime_ns,
                                      (unsigned long long)f->at);
        if (!row || PyList_SetItem(list, i, row) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *py_read(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *paths;
    unsigned long long base, at, end;
    if (!PyArg_ParseTuple(args, "O!KKK", &PyList_Type, &paths, &base, &at, &end)) return NULL;
    Py_ssize_t count = PyList_Size(paths);
    struct given *files = count <= MOST && at <= end ? calloc((size_t)count + 1, sizeof *files) : NULL;
    if (!files) return PyErr_Format(PyExc_ValueError, "too many files, or no room");
    for (Py_ssize_t i = 0; i < count; i++)
        if (!(files[i].path = PyBytes_AsString(PyList_GetItem(paths, i)))) {
            free(files);
            return NULL;
        }
    int seen;
    Py_BEGIN_ALLOW_THREADS
    seen = read_files(files, (int)count, (char *)(uintptr_t)base, at, end);
    Py_END_ALLOW_THREADS
    PyObject *result = pack_given(files, seen);
    free(files);
    return result;
}

static int parse_gotten(PyObject *rows, Py_ssize_t count, struct gotten *files) {
    for (Py_ssize_t i = 0; i < count; i++) {
        struct gotten *f = &files[i];
        Py_ssize_t second;
        if (!PyArg_ParseTuple(PyList_GetItem(rows, i), "KKILyyz#", &f->at, &f->length, &f->mode, &f->mtime_ns,
                              &f->temporary, &f->target, &f->second, &second))
            return -1;
    }
    return 0;
}

static PyObject *pack_gotten(const struct gotten *files, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *row = PyLong_FromLong(files[i].error);
        if (!row || PyList_SetItem(list, i, row) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *py_write(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *rows;
    unsigned long long base;
    if (!PyArg_ParseTuple(args, "O!K", &PyList_Type, &rows, &base)) return NULL;
    Py_ssize_t count = PyList_Size(rows);
    struct gotten *files = count <= MOST ? calloc((size_t)count + 1, sizeof *files) : NULL;
    if (!files) return PyErr_Format(PyExc_ValueError, "too many files");
    if (parse_gotten(rows, count, files) < 0) {
        free(files);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++) write_file(&files[i], (const char *)(uintptr_t)base);
    Py_END_ALLOW_THREADS
    PyObject *result = pack_gotten(files, count);
    free(files);
    return result;
}

static PyMethodDef methods[] = {
    {"read_files", py_read, METH_VARARGS,
     "read_files(paths, address, at, end) -> [(status, size, mode, mtime_ns, at)]; status 0 whole, 1 lost, 2 no room"},
    {"write_files", py_write, METH_VARARGS,
     "write_files([(at, length, mode, mtime_ns, temporary, target, second)], address) -> [errno]"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_files", "Reads and writes many small files in one call.",
                                    -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__files(void) {
    nameless = access("/proc/self/fd", X_OK) == 0;
    return PyModule_Create(&module);
}
