/* Declares all that the parts of the native layer share.
 *
 * Everything that a hook can reach obeys: no malloc, no locks, no stdio, no Python, errno kept. A hook may run in any
 * thread, in a signal handler, between fork and exec.
 */
#ifndef HPCSTAGE_NATIVE_H
#define HPCSTAGE_NATIVE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "_native_wire.h"

#define MAPS_MAX 64

/* ---- configuration: written once, before the first hook is installed ---- */
struct map {
    const char *source, *store;
    size_t source_n, store_n;
    size_t name_at; /* in `store`: where the dataset's name begins */
    int quiet; /* the self-test's: no counters, no wants */
};

struct config {
    struct map maps[MAPS_MAX]; /* longest source first */
    int maps_n;
    char sock[108]; /* empty: the path does not fit, no daemon can be asked */
    char node_dir[PATH_MAX - 64];
    uint64_t want_cap_ns;
    int direct;
    uint32_t python_version;
};
extern struct config config;

/* ---- paths ---- */
enum kind {
    OUTSIDE,
    FILE_NAME, /* below a dataset; the name could be a file's */
    DIR_NAME,  /* the root, or written with a slash at the end: no file */
    UNSURE,    /* below one, and too long for a name in the store */
};

struct place {
    const struct map *map;
    char local[PATH_MAX]; /* where its copy is or would be; the part after map->store_n is the path below the root */
};

enum how {
    FOLLOWED = 1, /* the call follows a link in the last component */
    OPENS = 2,    /* it is an open: whether the last component is a link is looked at now and then */
    AFRESH = 4,   /* it changes something: what is remembered of links does not count */
};

int concerns_as(int how, int dirfd, const char *path); /* cheap: 0 means OUTSIDE, as far as is remembered */
enum kind locate_as(int how, int dirfd, const char *path, struct place *at);
enum kind locate_fd(int fd, struct place *at);        /* by the name of an open file at the source */
enum kind locate_copy(int fd, struct place *at);      /* by the name of an open file in the store */
void source_of(const struct place *at, char *out);    /* out: PATH_MAX */
void cwd_changed(void);
void cwd_forked(void); /* in a forked child */
enum kind place_below(const struct map *map, const char *inside, const char *rest, struct place *at);

static inline int concerns(int dirfd, const char *path) {
    return concerns_as(0, dirfd, path);
}

/* The last component is taken as it is. */
static inline enum kind locate(int dirfd, const char *path, struct place *at) {
    return locate_as(0, dirfd, path, at);
}

/* ---- names that lead below a dataset through links; absolute, without `..` ---- */
enum kind locate_by_links(const char *path, int how, struct place *at);
int names_lead_outside(const char *path, int how); /* as far as is remembered */
void names_plain(const char *directory, size_t n); /* the kernel's name of a directory outside */
void names_forget(void); /* a link or a directory came under another name */
void names_forked(void); /* in a forked child */

/* ---- page and counters ---- */
int page_map(const char *path); /* 0, or an errno */
uint32_t page_state(void);
int page_serves(void);    /* copies may be opened */
void page_give_up(void);  /* until the daemon has read what was sent, no copy is opened */
void page_close(void);    /* no copy is ever opened again */
int page_is_closed(void);
int page_may_hold(uint64_t device); /* files of the datasets may be on it */
int page_is_unlinked(void); /* no file of the datasets is a symbolic link or behind one */
extern uint32_t *page_logging; /* never NULL */
void slot_claim(void);  /* this process's slot; also after a fork */
void slot_forget(void); /* in a forked child: the slot is claimed at the first count */
void slot_finish(void);
int slot_is_mine(void); /* 0 in a child between vfork and exec */
int slot_number(void);
uint32_t slot_pid(void);
void count(int counter, uint64_t value);
void counter_set(int counter, uint64_t value);
void counter_max(int counter, uint64_t value);
uint64_t counter_get(int counter);
void count_source_open(uint64_t ns, int reason);
void reads_begin(int fd); /* a file was opened under this number */
void count_read(int fd, int kind, ssize_t bytes, off_t at, uint64_t begin, uint64_t ns); /* at: -1: not known */
uint64_t now_ns(void);

/* Around each call that may wait for the source (FD_SOURCE) or for a copy (FD_LOCAL). The time in which any thread of
 * the process is inside one is counted once, however many are. The end gives how long the call took. */
int waits_none(void); /* no thread is inside such a call */
uint64_t wait_begin(int kind);
uint64_t wait_end(int kind, uint64_t begin);
void waits_forget(void); /* in a forked child: its parent's threads are not in it */
unsigned bucket_of_ns(uint64_t value);

/* ---- the ring of opens ---- */
enum { OPENED_LOCAL = 0, OPENED_SOURCE = 1 };
void ring_opened(const struct place *at, int where, uint64_t ns); /* only while logging() */
void ring_mark(uint32_t key, int64_t index);              /* the same */
void ring_forget(void); /* in a forked child: it makes its own */

static inline int logging(void) {
    return __atomic_load_n(page_logging, __ATOMIC_RELAXED) != 0;
}

/* ---- the daemon ---- */
int want(const struct place *at); /* READY: -1, else the Reason to read the source for */
void drop(const struct place *at); /* no copy of it is visible any more when this returns */
struct stat;
void drop_file(const struct place *at, const struct stat *now); /* the same for all names of what is there, or NULL */
void landed(const struct stat *info);        /* a file outside of the datasets is written to: may be one of theirs */
void landed_fd(int fd);                      /* the same of an open file; errno stays */

/* ---- open files: which descriptors are dataset files ---- */
enum {
    FD_OTHER = 0,
    FD_SOURCE = 1,
    FD_LOCAL = 2,
    FD_LISTING = 3, /* a directory of the source */
    FD_LOCK = 4,    /* ours: of the source, for locks on a copy */
};
#define FDS 65536
extern unsigned char fd_kinds[FDS];
extern __attribute__((visibility("hidden"))) int hpcstage_vforked; /* vfork has been called in this process */

static inline int fd_kind(int fd) {
    return (unsigned)fd < FDS ? fd_kinds[fd] : FD_OTHER;
}

static inline void fd_mark(int fd, int kind) {
    if ((unsigned)fd < FDS && fd_kinds[fd] != kind)
        fd_kinds[fd] = (unsigned char)kind;
}

int fd_duplicated(int from, int to); /* returns `to` */
int fd_of_stream(FILE *stream);      /* -1: it has none; errno stays */

/* ---- copies that are used for more than reading ---- */
extern int copies_locked;
extern unsigned copies_moving; /* not 0: other threads' reads wait */
void copies_wait(void);
int copy_surrender(int fd); /* 1: the source's descriptor is in its place now */
void copy_changes(int fd);  /* before a change through a descriptor: a copy's gets the source, the copy is dropped */
void copies_change(const struct place *at); /* before a change of a file by its name: no open copy of it is left */
int copy_named(const char *path); /* N of /proc/self/fd/N and the like, if that is a copy's; else -1 */
int copy_let_go(int fd); /* before a number is closed or gets another file: takes its mark, and returns it */
void copy_closed(int fd);
void copy_duplicated(int fd, int to);
void copies_forked(void); /* in a forked child */

static inline void fd_closed(int fd) {
    if (copies_locked || fd_kind(fd) == FD_LOCAL)
        copy_closed(fd);
    else
        fd_mark(fd, FD_OTHER);
}

/* ---- what stat says of copies ---- */
struct stat;
struct statx;
int copy_source(int fd, char *out);             /* the name at the source of a copy's descriptor; out: PATH_MAX */
int attributes_put(struct stat *info);          /* of a copy; 0: not known, the source must be asked */
int attributes_put_x(struct statx *info);       /* the same */
int attributes_same(int fd, int source);        /* whether an open source is the file of an open copy */
int attributes_result(int result, int fd, void *info); /* of fstat on any descriptor */
int attributes_of_named(const char *path, struct stat *info); /* of /proc/self/fd/N and the like, if that is a copy */

/* ---- the hooks and the import tables ---- */
struct hook {
    const char *name;
    void *function;
};
extern const struct hook hooks_open[], hooks_stat[], hooks_write[], hooks_read[], hooks_copies[],
    hooks_process[];

int tables_install(void);
void tables_refresh(void);
void tables_before_fork(void);
void tables_after_fork(void); /* in the parent */
void tables_forked(void);     /* in the child */
void tables_info(unsigned *objects, unsigned *slots);

/* A module's originals are called through its own import table, which is never redirected: an interposer that was
 * preloaded stays in the chain. Weak, so that a name that a libc lacks does not keep the module from loading. */
#define WEAK __attribute__((weak))

#endif
