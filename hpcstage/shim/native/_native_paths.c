/* Path rules: is this name below a dataset, and where is its copy? Lexical only, and only where that is exact.
 *
 * Names are compared on component boundaries with `//` and `/./` skipped. `..` at the front of a relative name is taken
 * off the working directory, which the kernel names without symbolic links; behind another component it may follow
 * one, so the kernel is asked where that leads.
 */
#include "_native.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define SHORT_NAME 384

struct config config;

/* The working directory as it was after `known` changes of it; `near` says whether a relative name without leading `..`
 * can be below a dataset. While `changes` is ahead, every relative name asks the kernel. One thread writes at a time,
 * and `known` is 0 meanwhile. */
enum { FAR, NEAR, UNKNOWN };
static struct {
    unsigned changes, known;
    int writing, near;
    size_t n;
    char path[PATH_MAX];
} cwd = {1, 0, 0, UNKNOWN, 0, ""};

/* Returns the part of an absolute path behind a map's source (starts with '/' or is empty), or NULL. */
static const char *below(const char *path, const struct map *map) {
    const char *p = path, *s = map->source;
    if (strncmp(p, s, map->source_n) == 0 && (p[map->source_n] == '/' || !p[map->source_n]))
        return p + map->source_n;
    while (*s) {
        if (*s != '/') {
            if (*p++ != *s++)
                return NULL;
            continue;
        }
        if (*p != '/')
            return NULL;
        for (;;) {
            while (*p == '/')
                p++;
            if (p[0] != '.' || p[1] != '/')
                break;
            p++;
        }
        s++;
    }
    return *p == '/' || !*p ? p : NULL;
}

/* Appends to the name in the store, from *to on, without empty and `.` components. */
static enum kind append(struct place *at, char **to, const char *p) {
    char *begin = at->local + at->map->store_n, *out = *to;
    const char *end = at->local + PATH_MAX - 1;
    int closed = 0;
    while (*p) {
        while (*p == '/')
            p++;
        if (!*p || (p[0] == '.' && (p[1] == '/' || !p[1]))) {
            closed = 1;
            p += *p == '.';
            continue;
        }
        if (p[0] == '.' && p[1] == '.' && (p[2] == '/' || !p[2]))
            return UNSURE;
        closed = 0;
        if (out >= end)
            return UNSURE;
        *out++ = '/';
        while (*p && *p != '/') {
            if (out >= end)
                return UNSURE;
            *out++ = *p++;
        }
    }
    *out = 0;
    *to = out;
    return closed || out == begin ? DIR_NAME : FILE_NAME;
}

/* Finds the place of what lies at `inside` and then `rest` below a map. */
enum kind place_below(const struct map *map, const char *inside, const char *rest, struct place *at) {
    char *to = at->local + map->store_n;
    at->map = map;
    memcpy(at->local, map->store, map->store_n);
    return append(at, &to, inside) == UNSURE ? UNSURE : append(at, &to, rest);
}

/* Finds the place by the text alone. */
static enum kind locate_text(const char *path, struct place *at) {
    for (int i = 0; i < config.maps_n; i++) {
        const char *rest = below(path, &config.maps[i]);
        if (rest)
            return place_below(&config.maps[i], "", rest, at);
    }
    return OUTSIDE;
}

static enum kind locate_from(char *base, size_t n, const char *path, int how, struct place *at);
static size_t name_of_fd(int fd, char *out);

/* Replaces the part up to the last `..` by the kernel's name for it, and appends the rest. */
static __attribute__((noinline)) enum kind locate_by_kernel(const char *path, const char *rest, int how,
                                                             struct place *at) {
    ROOM(char, base);
    size_t n = (size_t)(rest - path);
    int saved = errno;
    if (!base || n >= PATH_MAX)
        return OUTSIDE;
    memcpy(base, path, n);
    base[n] = 0;
    int fd = open(base, O_PATH | O_DIRECTORY | O_CLOEXEC);
    n = fd >= 0 ? name_of_fd(fd, base) : 0;
    if (fd >= 0)
        close(fd);
    errno = saved;
    return n ? locate_from(base, n, rest, how, at) : OUTSIDE;
}

/* Returns what is behind the last `..` component, or NULL. */
static const char *behind_dots(const char *path) {
    const char *found = NULL;
    for (const char *p = path; (p = strstr(p, "/..")); p += 3)
        if (p[3] == '/' || !p[3])
            found = p + 3;
    return found;
}

static enum kind locate_absolute(const char *path, int how, struct place *at) {
    const char *rest = behind_dots(path);
    if (rest)
        return locate_by_kernel(path, rest, how, at);
    enum kind kind = locate_text(path, at);
    return kind == OUTSIDE ? locate_by_links(path, how, at) : kind;
}

/* Makes base + '/' + relative, with leading `.` and `..` taken off; base has no symbolic links. */
static enum kind locate_from(char *base, size_t n, const char *path, int how, struct place *at) {
    if (base[0] != '/')
        return OUTSIDE;
    for (;;) {
        while (*path == '/')
            path++;
        if (path[0] != '.')
            break;
        if (path[1] == '/' || !path[1]) {
            path += 1;
        } else if (path[1] == '.' && (path[2] == '/' || !path[2])) {
            path += 2;
            while (n > 0 && base[--n] != '/')
                ;
        } else {
            break;
        }
    }
    size_t rest = strlen(path);
    if (n + 1 + rest >= PATH_MAX)
        return OUTSIDE;
    base[n] = '/';
    memcpy(base + n + 1, path, rest + 1);
    if (!strchr(path, '/'))
        names_plain(base, n);
    return locate_absolute(base, how, at);
}

static int near_datasets(const char *path, size_t n) {
    if (path[0] != '/')
        return FAR;
    for (int i = 0; i < config.maps_n; i++) {
        const char *s = config.maps[i].source;
        if (n == 1 || (strncmp(s, path, n) == 0 && s[n] == '/') || below(path, &config.maps[i]))
            return NEAR;
    }
    return FAR;
}

static void note_cwd(unsigned changes) {
    __atomic_store_n(&cwd.known, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    if (!getcwd(cwd.path, sizeof cwd.path))
        return;
    cwd.n = strlen(cwd.path);
    cwd.near = near_datasets(cwd.path, cwd.n);
    __atomic_store_n(&cwd.known, changes, __ATOMIC_RELEASE);
}

/* Announces the change before anything else: a thread that cannot note it leaves it to the thread that is writing, if
 * there is one. */
void cwd_changed(void) {
    int saved = errno;
    unsigned changes = __atomic_add_fetch(&cwd.changes, 1, __ATOMIC_SEQ_CST);
    do {
        if (__atomic_exchange_n(&cwd.writing, 1, __ATOMIC_SEQ_CST))
            break;
        changes = __atomic_load_n(&cwd.changes, __ATOMIC_SEQ_CST);
        if (cwd.known != changes) /* one text per number */
            note_cwd(changes);
        __atomic_store_n(&cwd.writing, 0, __ATOMIC_SEQ_CST);
    } while (__atomic_load_n(&cwd.changes, __ATOMIC_SEQ_CST) != changes);
    errno = saved;
}

/* Is called in a forked child, where the thread that was writing does not exist. */
void cwd_forked(void) {
    if (cwd.writing) {
        cwd.writing = 0;
        cwd_changed();
    }
}

/* Whether what is noted is still true. */
static int cwd_known(unsigned *changes) {
    *changes = __atomic_load_n(&cwd.known, __ATOMIC_ACQUIRE);
    return *changes && *changes == __atomic_load_n(&cwd.changes, __ATOMIC_ACQUIRE);
}

static int cwd_near(void) {
    unsigned changes;
    return cwd_known(&changes) ? __atomic_load_n(&cwd.near, __ATOMIC_RELAXED) : UNKNOWN;
}

/* Returns 0 if it is not noted, or longer than `most`. */
static size_t noted_cwd(char *out, size_t most) {
    unsigned changes;
    size_t n = cwd.n;
    if (!cwd_known(&changes) || n > most)
        return 0;
    memcpy(out, cwd.path, n);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&cwd.known, __ATOMIC_RELAXED) == changes ? n : 0;
}

static size_t read_cwd(char *out) {
    size_t n = noted_cwd(out, PATH_MAX - 1);
    return n ? n : getcwd(out, PATH_MAX) ? strlen(out) : 0;
}

/* Reads what /proc says an open file is called; returns 0 if there is nothing or it is cut off. */
static size_t name_of_fd(int fd, char *out) {
    char link[32] = "/proc/self/fd/";
    *put_number(link + 14, (unsigned)fd) = 0;
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n <= 0 || n >= PATH_MAX - 1)
        return 0;
    out[n] = 0;
    return (size_t)n;
}

static __attribute__((noinline)) enum kind locate_relative(int how, int dirfd, const char *path, struct place *at) {
    ROOM(char, base);
    int saved = errno;
    size_t n = !base ? 0 : dirfd == AT_FDCWD ? read_cwd(base) : dirfd >= 0 ? name_of_fd(dirfd, base) : 0;
    errno = saved;
    return n ? locate_from(base, n, path, how, at) : OUTSIDE;
}

/* Handles a relative name from a working directory that is not near a dataset. What is long is not known. */
static int leads_outside(const char *path, int how) {
    char name[SHORT_NAME];
    size_t n = noted_cwd(name, sizeof name / 2), path_n = strlen(path);
    if (!n || n + 1 + path_n >= sizeof name)
        return 0;
    name[n] = '/';
    memcpy(name + n + 1, path, path_n + 1);
    return names_lead_outside(name, how);
}

int concerns_as(int how, int dirfd, const char *path) {
    if (!path || !*path)
        return 0;
    if (*path == '/') {
        for (int i = 0; i < config.maps_n; i++)
            if (below(path, &config.maps[i]))
                return 1;
        return (how & AFRESH) || strstr(path, "/../") || !names_lead_outside(path, how);
    }
    if (dirfd != AT_FDCWD)
        return dirfd >= 0;
    return (how & AFRESH) || cwd_near() != FAR ||
           (path[0] == '.' && (path[1] == '.' || path[1] == '/')) || strstr(path, "/../") || !leads_outside(path, how);
}

enum kind locate_as(int how, int dirfd, const char *path, struct place *at) {
    if (!at)
        return OUTSIDE;
    return *path == '/' ? locate_absolute(path, how, at) : locate_relative(how, dirfd, path, at);
}

enum kind locate_fd(int fd, struct place *at) {
    ROOM(char, name);
    int saved = errno;
    size_t n = at && name && fd >= 0 ? name_of_fd(fd, name) : 0;
    errno = saved;
    return n && name[0] == '/' ? locate_text(name, at) : OUTSIDE;
}

enum kind locate_copy(int fd, struct place *at) {
    int saved = errno;
    size_t n = at && fd >= 0 ? name_of_fd(fd, at->local) : 0;
    errno = saved;
    for (int i = 0; n && i < config.maps_n; i++) {
        const struct map *map = &config.maps[i];
        if (n > map->store_n && at->local[map->store_n] == '/' && memcmp(at->local, map->store, map->store_n) == 0) {
            at->map = map;
            return FILE_NAME;
        }
    }
    return OUTSIDE;
}

void source_of(const struct place *at, char *out) {
    const char *rest = at->local + at->map->store_n;
    size_t n = strlen(rest);
    out[0] = 0;
    if (at->map->source_n + n >= PATH_MAX)
        return;
    memcpy(out, at->map->source, at->map->source_n);
    memcpy(out + at->map->source_n, rest, n + 1);
}
