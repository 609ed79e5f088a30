/* Declares all that the parts of the native layer share.
 *
 * Everything that a hook can reach obeys: no malloc, no locks, no stdio, no Python, errno kept, less than 2 kB of stack
 * in all. A hook may run in any thread, in a signal handler, between fork and exec.
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
    int quiet; /* the self-test's: no counters, no requests */
};

struct config {
    struct map maps[MAPS_MAX]; /* longest source first */
    int maps_n;
    char sock[108]; /* empty: the path does not fit, no daemon can be asked */
    char node_dir[PATH_MAX - 64];
    uint64_t request_cap_ns;
    int direct;
    uint32_t python_version;
};
extern struct config config;

/* ---- room for names: not on the stack, which may be small ---- */
#define ROOM_BYTES (PATH_MAX + 48)
void *room_take(void); /* NULL: there is none, and nothing is served any more */
void room_give(void *variable);
void rooms_left(void);   /* this thread ends */
void rooms_forked(void); /* in a forked child */
/* A variable that points to room, which is given back where the variable ends. */
#define ROOM(type, name) __attribute__((cleanup(room_give))) type *name = room_take()
#define PLACE(name) ROOM(struct place, name)
void node_path(char *out, const char *name, size_t n); /* of what is in the node directory; `name` begins with a slash */
char *put_number(char *out, unsigned value);           /* returns where it ends */

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
_Static_assert(sizeof(struct place) <= ROOM_BYTES, "place");

enum how {
    FOLLOWED = 1, /* the call follows a link in the last component */
    OPENS = 2,    /* it is an open: whether the last component is a link is looked at now and then */
    AFRESH = 4,   /* it changes something: what is remembered of links does not count */
};

int concerns_as(int how, int dirfd, const char *path); /* cheap: 0 means OUTSIDE, as far as is remembered */
/* `at` may be NULL, where there was no room for it: OUTSIDE. */
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

/* ---- directories and links above the datasets ---- */
int roots_before(int dirfd, const char *path);   /* whether what has this name may be one; before a change of it */
int roots_before_unlink(int dirfd, const char *path); /* the same where only a link may be one */
int roots_after(int turns, int result);          /* returns the result of the change */

/* ---- page and counters ---- */
int page_map(const char *path); /* 0, or an errno */
uint32_t page_state(void);
int page_serves(void);    /* copies may be opened */
void page_give_up(void);  /* until the daemon has read what was sent, no copy is opened */
void page_close(void);    /* no copy is ever opened again */
int page_is_closed(void);
int page_may_hold(uint64_t device); /* files of the datasets may be on it */
int page_is_unlinked(void); /* no file of the datasets is a symbolic link or behind one */
extern uint32_t *page_logging, *page_published, *page_voided; /* never NULL */
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
void count_read(int fd, int kind, ssize_t bytes, off_t at, uint64_t ns); /* at: -1: not known, or no matter for a copy */
uint64_t now_ns(void);

/* Around each call that may wait for the source (FD_SOURCE) or for a copy (FD_LOCAL). The time in which any thread of
 * the process is inside one is counted once, however many are. The end gives how long the call took. */
int waits_none(void); /* no thread is inside such a call */
uint64_t wait_begin(int kind);
uint64_t wait_end(int kind, uint64_t begin);
int holds_any(void);     /* some thread is inside a call that holds its file */
void hold_begin(void); /* around a call that holds its file under its number: nothing is put in places meanwhile */
void hold_end(void);
#define HELD(fd, type, call) \
    { \
        if (fd_kind(fd) != FD_SOURCE && fd_kind(fd) != FD_LOCAL) \
            return call; \
        hold_begin(); \
        type held_result = call; \
        hold_end(); \
        return held_result; \
    }
/* Takes one from a count, but never from none: a handler that jumped within itself may have taken it. */
static inline uint32_t take_one(uint32_t *count) {
    uint32_t left = __atomic_sub_fetch(count, 1, __ATOMIC_SEQ_CST);
    return __builtin_expect(left == UINT32_MAX, 0) ? __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST) : left;
}
void waits_left(void);   /* this thread jumps out of the calls that it is inside */
void waits_forget(void); /* in a forked child: its parent's threads are not in it */
unsigned bucket_of_ns(uint64_t value);

/* ---- the ring of opens ---- */
void ring_opened(const struct place *at, uint64_t ns); /* only while logging() */
void ring_forget(void); /* in a forked child: it makes its own */

static inline int logging(void) {
    return __atomic_load_n(page_logging, __ATOMIC_RELAXED) != 0;
}

/* ---- the daemon ---- */
int request(const struct place *at); /* READY: -1, else the Reason to read the source for */
void drop(const struct place *at); /* no copy of it is visible any more when this returns */
struct stat;
void drop_file(const struct place *at, const struct stat *now); /* the same for all names of what is there, or NULL */
void landed(const struct stat *info);        /* a file outside of the datasets is written to: may be one of theirs */
void drop_all(const struct map *map);         /* the same of all files of a dataset */
void landed_fd(int fd);                      /* the same of an open file; errno stays */

/* ---- open files: which descriptors are dataset files ---- */
enum {
    FD_OTHER = 0,
    FD_SOURCE = 1,
    FD_LOCAL = 2,
    FD_LISTING = 3, /* a directory of the source */
    FD_LOCK = 4,    /* ours: of the source, for locks on a copy */
    FD_ARRIVING = 5, /* ours: of a copy that is on its way */
};
#define FDS 65536 /* numbers from here on have no marks: they stand for files of the source only */
extern unsigned char fd_kinds[FDS];
extern __attribute__((visibility("hidden"))) int hpcstage_vforked; /* how often this process called vfork */

static inline int fd_kind(int fd) {
    return (unsigned)fd < FDS ? fd_kinds[fd] : FD_OTHER;
}

static inline void fd_mark(int fd, int kind) {
    if ((unsigned)fd < FDS && fd_kinds[fd] != kind)
        fd_kinds[fd] = (unsigned char)kind;
}

int fd_duplicated(int from, int to, int is_inherited); /* returns `to`, which exec leaves open where it is inherited */
int fd_of_stream(FILE *stream);      /* -1: it has none; errno stays */

/* ---- copies that are used for more than reading ---- */
struct stat;
extern int copies_locked;
extern int copy_locks[FDS]; /* by a copy's descriptor: that of its source, on which its locks are, plus one */
extern unsigned copies_moving; /* not STILL: other threads' reads wait */
enum { STILL, PUTTING }; /* or twice the number of the move; PUTTING is added while numbers are given another meaning */
void copies_wait(void);
int copy_surrender(int fd); /* 1: the source's descriptor is in its place now */
/* Before a change through a descriptor: a copy's gets the source, the copy is dropped. -1, with errno: no descriptor is
 * free for the source, and the change would be one of the copy. */
int copy_changes(int fd);
void copies_change(const struct place *at); /* before a change of a file by its name: no open copy of it is left */
int copy_named(const char *path); /* N of /proc/self/fd/N and the like, if that is a copy's; else -1 */
int copy_let_go(int fd); /* before a number is closed or gets another file: takes its mark, and returns it */
void copy_closed(int fd);
void copy_duplicated(int fd, int to);
void copies_forked(void); /* in a forked child */
int copy_returns(int fd);  /* puts the source back in the place of a copy that was void; 1: it is there now */
int copy_keeps_at(void);   /* the lowest number for it */

/* What puts something in places: one thread at a time, with signals blocked and other threads' calls held. */
int turn_take(void);
void turn_give(int cancels);
struct putting {
    uint64_t signals;
};
int putting_begin(struct putting *putting, int waits); /* 0: other threads' calls did not end in so many waits */
void putting_end(const struct putting *putting);
int next_sharing(int kind, int fd, int from); /* the next number of that kind that shares `fd`, from `from` on; or -1 */

static inline void fd_closed(int fd) {
    if (copies_locked || fd_kind(fd) != FD_OTHER)
        copy_closed(fd);
}

/* ---- open files of the source in whose place the copy is put once it is there ---- */
enum {
    STREAM = 1,    /* the C library reads it by itself */
    INHERITED = 2, /* exec leaves it open */
    MOVED = 4,     /* it is a copy that was put in a source's place */
};
#define MOVED_OFFSET (((off_t)1 << 43) - 4097) /* of a source that was kept, as long as nothing is read of it */
struct opening {
    uint32_t serial; /* the same for all numbers that share the open file; 0: it stays where it is */
    uint32_t looked; /* PUBLISHED when its copy was last looked for */
    uint32_t forks, spawns; /* how many there had been when it was opened */
    uint32_t facts;
    uint32_t anew;                /* what was told of open files when the row was looked for */
    uint32_t rows_seen, arriving; /* what was looked for when, and found: the serial number of a row, or 0 */
    uint32_t counting, row;       /* the serial number of the row in which its reads count, or 0, and that row */
    uint32_t awaited;             /* the stripe for which it has waited in vain, plus one; 0: none */
    uint64_t run_to, run;         /* where the last read ended, and the bytes in a row up to there */
    uint64_t next;     /* the offset, plus one; 0: it is not known */
    uint32_t is_astray; /* the offset was moved by others, and may be again: it is asked for each time */
};
extern struct opening openings[FDS];
extern uint32_t moves_voided; /* VOIDED when the moved copies were last looked at */

void moved_opened(int fd, int flags, int is_stream, uint32_t published); /* at the source; `published`: before that */
void moved_forget(int fd);                       /* the number stands for something else */
void moved_duplicated(int from, int to, int is_inherited);
void moved_inherited(int fd);                    /* exec leaves it open, if only for a while */
void moved_shared(int fd);                       /* its open file is another process's, too, or will be */
void moved_locks(int fd);                        /* before a lock of the process on the file, which any close frees */
int moved_is_locked(int fd);                     /* whether one is noted for the file */
void moved_forks(void);                          /* before a fork */
int moved_look(int fd);                          /* returns the kind that the descriptor has now */

/* ---- large files that are on their way: what has arrived is read from the incoming file ---- */
#define NOT_ARRIVED ((ssize_t)-2) /* nothing was read: the source is to be */
struct iovec;
/* As preadv and readv do. is_own: the list is this library's, and not one of the program that may be nowhere. */
ssize_t arrived_at(int fd, const struct iovec *parts, int n, int is_own, off_t at);
ssize_t arrived_next(int fd, const struct iovec *parts, int n, int is_own);
void arrivals_source(int fd, off_t at, uint64_t bytes); /* were read at the source; at: -1: not known */
void arrivals_seeked(int fd, off_t to); /* the offset of a file at the source */
void arrivals_anew(void);   /* open files are compared with what arrives once more */
void arrivals_left(int is_alone); /* this thread jumps out of the reads that it is inside; is_alone: nobody else is inside one */
void arrivals_forked(void); /* in a forked child */

static inline int moved_is(int fd, int kind) {
    return kind == FD_LOCAL && (unsigned)fd < FDS && (openings[fd].facts & MOVED);
}

/* Before a call that reads a dataset file: the copy takes the source's place, or the source a void copy's. */
static inline int moved_kind(int fd, int kind) {
    if (kind == FD_SOURCE && openings[fd].looked == __atomic_load_n(page_published, __ATOMIC_ACQUIRE))
        return kind;
    if (kind == FD_LOCAL && (!(openings[fd].facts & MOVED) ||
                             (moves_voided == __atomic_load_n(page_voided, __ATOMIC_ACQUIRE) && page_serves())))
        return kind;
    return kind == FD_SOURCE || kind == FD_LOCAL ? moved_look(fd) : kind;
}

/* ---- what stat says of copies ---- */
struct stat;
struct statx;
int copy_source(int fd, char *out);             /* the name at the source of a copy's descriptor; out: PATH_MAX */
int attributes_put(struct stat *info);          /* of a copy; 0: not known, the source must be asked */
int attributes_put_x(struct statx *info);       /* the same */
int attributes_same(int fd, int source);        /* whether an open source is the file of an open copy */
int attributes_equal(int fd, const struct stat *source); /* whether stat says the same of a copy, but for its access */
int attributes_result(int result, int fd, void *info); /* of fstat on any descriptor */
int attributes_of_named(const char *path, struct stat *info); /* of /proc/self/fd/N and the like, if that is a copy */

/* ---- the hooks and the import tables ---- */
struct hook {
    const char *name;
    void *function;
};
extern const struct hook hooks_open[], hooks_stat[], hooks_write[], hooks_read[], hooks_copies[],
    hooks_moves[], hooks_process[];

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
