/* Gives the native layer its Python face: configures it once, then asks it for its state. No other file here knows
 * Python.
 *
 * The module uses the limited API, so that one build serves every CPython from 3.8 on.
 */
#define _GNU_SOURCE
#define Py_LIMITED_API 0x03080000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_native.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

static int installed;

static int add_map(const char *source, Py_ssize_t source_n, const char *store, Py_ssize_t store_n, int quiet) {
    if (config.maps_n == MAPS_MAX || source_n < 2 || source_n >= PATH_MAX || store_n < 2 || store_n >= PATH_MAX - 256)
        return -1;
    struct map map = {strdup(source), strdup(store), (size_t)source_n, (size_t)store_n, 0, quiet};
    if (!map.source || !map.store)
        return -1;
    const char *slash = strrchr(map.store, '/');
    map.name_at = slash ? (size_t)(slash + 1 - map.store) : 0;
    int at = config.maps_n++;
    for (; at > 0 && config.maps[at - 1].source_n < map.source_n; at--)
        config.maps[at] = config.maps[at - 1];
    config.maps[at] = map;
    return 0;
}

static int add_maps(PyObject *maps) {
    for (Py_ssize_t i = 0; i < PyList_Size(maps); i++) {
        const char *source, *store;
        Py_ssize_t source_n, store_n;
        int quiet;
        PyObject *one = PyList_GetItem(maps, i);
        if (!one || !PyArg_ParseTuple(one, "y#y#p", &source, &source_n, &store, &store_n, &quiet))
            return -1;
        if (add_map(source, source_n, store, store_n, quiet) != 0) {
            PyErr_SetString(PyExc_ValueError, "map: too many, too long or empty");
            return -1;
        }
    }
    return 0;
}

static void forked(void) {
    tables_forked();
    slot_forget();
    ring_forget();
    cwd_forked();
    copies_forked();
    arrivals_forked();
    rooms_forked();
    names_forked();
}

static PyObject *refuse(const char *why) {
    PyErr_SetString(PyExc_RuntimeError, why);
    return NULL;
}

PyDoc_STRVAR(install_doc, "install(maps, sock, page, node_dir, uid, request_cap_ms, direct, python_version)\n\n"
                          "maps: [(source, store, quiet)]. Redirects from now on; once per process.");

static PyObject *install(PyObject *self, PyObject *arguments) {
    PyObject *maps;
    const char *sock, *page, *node_dir;
    unsigned long uid, request_cap_ms, python_version;
    int direct;
    if (!PyArg_ParseTuple(arguments, "O!yyykkpk", &PyList_Type, &maps, &sock, &page, &node_dir, &uid, &request_cap_ms,
                          &direct, &python_version))
        return NULL;
    if (installed)
        return refuse("installed already");
    if (getauxval(AT_SECURE) || geteuid() != (uid_t)uid)
        return refuse("not the user of this run");
    if (strlen(node_dir) >= sizeof config.node_dir)
        return refuse("the node directory's name is too long");
    if (strlen(sock) < sizeof config.sock)
        strcpy(config.sock, sock);
    strcpy(config.node_dir, node_dir);
    config.request_cap_ns = (uint64_t)request_cap_ms * 1000000u;
    config.direct = direct;
    config.python_version = (uint32_t)python_version;
    int problem = page_map(page);
    if (problem) {
        errno = problem;
        return PyErr_SetFromErrnoWithFilename(PyExc_OSError, page);
    }
    if (add_maps(maps) != 0)
        return NULL;
    installed = 1;
    cwd_changed();
    if (pthread_atfork(tables_before_fork, tables_after_fork, forked) != 0 || tables_install() != 0)
        return refuse("the import tables cannot be redirected");
    Py_RETURN_NONE;
}

PyDoc_STRVAR(withdraw_doc, "withdraw(quiet_only)\n\nForgets the quiet maps, or all: nothing is redirected any more.");

static PyObject *withdraw(PyObject *self, PyObject *arguments) {
    int quiet_only, kept = 0;
    if (!PyArg_ParseTuple(arguments, "p", &quiet_only))
        return NULL;
    for (int i = 0; i < config.maps_n; i++)
        if (quiet_only && !config.maps[i].quiet)
            config.maps[kept++] = config.maps[i];
    config.maps_n = kept;
    names_forget();
    cwd_changed();
    Py_RETURN_NONE;
}

static PyObject *refresh(PyObject *self, PyObject *ignored) {
    tables_refresh();
    Py_RETURN_NONE;
}

static PyObject *claim(PyObject *self, PyObject *ignored) {
    slot_claim();
    Py_RETURN_NONE;
}

static PyObject *finish(PyObject *self, PyObject *ignored) {
    slot_finish();
    Py_RETURN_NONE;
}

static PyObject *info(PyObject *self, PyObject *ignored) {
    unsigned objects, slots;
    tables_info(&objects, &slots);
    return Py_BuildValue("{s:I,s:I,s:i,s:i,s:i}", "objects", objects, "redirected", slots, "slot", slot_number(), "maps",
                         config.maps_n, "installed", installed);
}

static PyObject *serves(PyObject *self, PyObject *ignored) {
    return PyBool_FromLong(installed && config.maps_n);
}

static PyObject *py_count(PyObject *self, PyObject *arguments) {
    int counter;
    unsigned long long value;
    if (!PyArg_ParseTuple(arguments, "iK", &counter, &value))
        return NULL;
    if (counter < 0 || counter >= COUNTERS) {
        PyErr_SetString(PyExc_IndexError, "no such counter");
        return NULL;
    }
    count(counter, value);
    Py_RETURN_NONE;
}

static PyObject *py_get(PyObject *self, PyObject *argument) {
    long counter = PyLong_AsLong(argument);
    if (counter < 0 || counter >= COUNTERS) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_IndexError, "no such counter");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(counter_get((int)counter));
}

PyDoc_STRVAR(step_doc, "loader_step(begin_ns, end_ns, workers)\n\nOne batch was waited for.");

static PyObject *loader_step(PyObject *self, PyObject *arguments) {
    unsigned long long begin, end, workers;
    if (!PyArg_ParseTuple(arguments, "KKK", &begin, &end, &workers))
        return NULL;
    count(COUNTER_LOADER_STEPS, 1);
    count(COUNTER_LOADER_WAIT_NS, end - begin);
    if (!counter_get(COUNTER_LOADER_FIRST_NS))
        counter_set(COUNTER_LOADER_FIRST_NS, begin);
    counter_max(COUNTER_LOADER_LAST_NS, end);
    counter_max(COUNTER_LOADER_WORKERS, workers);
    Py_RETURN_NONE;
}

static PyObject *bucket(PyObject *self, PyObject *argument) {
    unsigned long long value = PyLong_AsUnsignedLongLong(argument);
    return PyErr_Occurred() ? NULL : PyLong_FromUnsignedLong(bucket_of_ns(value));
}

static PyObject *wire(PyObject *self, PyObject *ignored) {
    static const struct {
        const char *name;
        long value;
    } numbers[] = {
#define WIRE_PAIR(name, value) {#name, value},
        WIRE(WIRE_PAIR)};
    PyObject *out = PyDict_New();
    for (size_t i = 0; out && i < sizeof numbers / sizeof *numbers; i++) {
        PyObject *value = PyLong_FromLong(numbers[i].value);
        if (!value || PyDict_SetItemString(out, numbers[i].name, value) != 0)
            Py_CLEAR(out);
        Py_XDECREF(value);
    }
    return out;
}

static PyMethodDef methods[] = {
    {"install", install, METH_VARARGS, install_doc},
    {"withdraw", withdraw, METH_VARARGS, withdraw_doc},
    {"refresh", refresh, METH_NOARGS, "refresh()\n\nRedirects objects that were loaded since."},
    {"claim", claim, METH_NOARGS, "claim()\n\nTakes this process's slot now."},
    {"finish", finish, METH_NOARGS, "finish()\n\nNotes the time of an orderly exit."},
    {"info", info, METH_NOARGS, "info() -> dict"},
    {"serves", serves, METH_NOARGS, "serves() -> bool: an interpreter of this process has installed it"},
    {"count", py_count, METH_VARARGS, "count(counter, value)\n\nAdds."},
    {"get", py_get, METH_O, "get(counter) -> int"},
    {"loader_step", loader_step, METH_VARARGS, step_doc},
    {"bucket_of_ns", bucket, METH_O, "bucket_of_ns(value) -> int"},
    {"wire", wire, METH_NOARGS, "wire() -> dict of the protocol's numbers"},
    {NULL, NULL, 0, NULL}};

/* Subinterpreters share what this module holds, which is one per process; those of 3.12 and later, each with a lock of
 * its own, must be told that it serves them. The limited API of 3.8 has no names for that. */
#define MULTIPLE_INTERPRETERS 3
#define EACH_WITH_ITS_OWN_LOCK ((void *)2)

static PyModuleDef_Slot slots[2];
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_hpcstage_native", "The native layer of the shim.", 0,
                                    methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__hpcstage_native(void) {
    if (strncmp(Py_GetVersion(), "3.", 2) == 0 && atoi(Py_GetVersion() + 2) >= 12)
        slots[0] = (PyModuleDef_Slot){MULTIPLE_INTERPRETERS, EACH_WITH_ITS_OWN_LOCK};
    return PyModuleDef_Init(&module);
}
