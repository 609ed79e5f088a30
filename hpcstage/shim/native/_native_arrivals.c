/* Reads what has arrived of large files whose copies are on their way, from the incoming file, which the process opens
 * beside the source.
 *
 * The open file of the program stays the source's: its offset, its locks and what stat says are. A read is served only
 * if all of its range has arrived, the row is granted and shown before and after, the source is what the row says, and
 * both numbers stand for the files that they stood for; else the source is read. The offset is moved by seeking from
 * where it is, which the kernel does in one step: that is right also where threads or processes share it.
 *
 * A thread may leave a read at any moment by a handler of a signal that jumps out of it. So nothing is taken from it
 * meanwhile that it would not get back: in the kernel's calls here it cannot be cancelled, as they are not the C library's.
 *
 * A row is granted when a program asks for a file, before anything of it is copied: until the row is shown its reads only
 * count. Each reader says how far it is and how much it has read in a row up to there, by which the copier goes ahead of it.
 * One that goes on where it ended waits for a stripe that the copier is at. A row is let go of once it is not granted any
 * more; its number is the process's until then.
 */
#include "_native.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

extern int statx(int, const char *, int, unsigned, struct statx *) WEAK;

#define ENTRIES 16
#define BUSY UINT32_MAX
#define MOST_PARTS 1024
#define LOOK_EVERY 64
#define STRIPES_AT_ONCE 32 /* a longer read is told how much it asks for before it is begun */
#define FIRST_MARK ((off_t)1 << 42) /* a file system with small blocks has no greater offsets than that and all serials */
#define MOST_WAIT_NS 500000000ull
#define NOTE_EVERY ((uint64_t)256 << 10) /* bytes in a row after which a reader says where it is */

struct front {
    uint64_t at, run;
};
struct row {
    uint64_t device, inode, size;
    int64_t mtime, ctime;
    uint32_t id, stripe_bytes;
    uint64_t reserved;
    uint32_t wished, priority;
    char name[ARRIVING_NAME_BYTES];
    uint64_t served, read, share[9], jumped, ahead, faults;
    struct front fronts[ROW_READERS];
};
_Static_assert(sizeof(struct row) == ARRIVING_ROW_BYTES, "row");
_Static_assert(offsetof(struct row, wished) == WISHED_OFFSET, "wished");
_Static_assert(offsetof(struct row, priority) == PRIORITY_OFFSET, "priority");
_Static_assert(offsetof(struct row, jumped) == JUMPED_OFFSET, "jumped");
_Static_assert(offsetof(struct row, fronts) == FRONTS_OFFSET, "fronts");
_Static_assert(offsetof(struct row, name) == NAME_OFFSET, "name");
_Static_assert(offsetof(struct row, served) == READ_OFFSET, "served");

struct table {
    uint64_t magic;
    uint32_t rows, row_stripes;
    uint64_t reserved[6];
    uint32_t granted[ARRIVING_ROWS], shown[ARRIVING_ROWS];
    struct row row[ARRIVING_ROWS];
};
_Static_assert(offsetof(struct table, granted) == GRANTED_OFFSET, "granted");
_Static_assert(offsetof(struct table, shown) == SHOWN_OFFSET, "shown");
_Static_assert(offsetof(struct table, row) == ARRIVING_HEADER_BYTES, "rows");

/* An incoming file that this process has open. */
static struct entry {
    uint32_t serial; /* 0: free; BUSY: it is opened or closed */
    int row, fd;
    uint64_t device, inode;
    uint32_t users; /* threads that may read it */
} entries[ENTRIES];

static struct table *table;
static int tried;
static uint32_t anew, reads_since; /* since what else is on its way was looked at */

/* ---- calls of the kernel in which a thread cannot be cancelled ---- */
static int open_file(const char *path, int flags) {
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC | O_NOFOLLOW, 0);
}

static void close_file(int fd) {
    syscall(SYS_close, fd);
}

static ssize_t read_parts(int fd, const struct iovec *parts, int n, int is_own, off_t at) {
#ifdef __LP64__
    if (is_own && n == 1)
        return syscall(SYS_pread64, fd, parts->iov_base, parts->iov_len, at);
    return syscall(SYS_preadv, fd, parts, n, at, 0L);
#else
    return preadv(fd, parts, n, at);
#endif
}

static void pause_100us(void) {
    static const struct timespec pause = {0, 100000};
#ifdef __LP64__
    syscall(SYS_nanosleep, &pause, NULL);
#else
    nanosleep(&pause, NULL);
#endif
}

void arrivals_anew(void) {
    __atomic_add_fetch(&anew, 1, __ATOMIC_RELAXED);
}

/* The entries that a thread reads from are counted in a value of its own, too, by a digit for each: one that jumps out of
 * a read is at none of them any more, and nobody waits for it to close them. */
#define DIGIT_BITS 4
#define DIGIT 15u
static __attribute__((tls_model("initial-exec"))) _Thread_local uint64_t uses;
_Static_assert(DIGIT_BITS * ENTRIES <= 8 * sizeof uses, "a digit for each");

static void use_begins(struct entry *e) {
    __atomic_add_fetch(&e->users, 1, __ATOMIC_SEQ_CST);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    uses += (uint64_t)1 << DIGIT_BITS * (e - entries);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

static void use_ends(struct entry *e) {
    if (!(uses >> DIGIT_BITS * (e - entries) & DIGIT))
        return;
    uses -= (uint64_t)1 << DIGIT_BITS * (e - entries);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    take_one(&e->users);
}

void arrivals_left(int is_alone) {
    uint64_t left = uses;
    uses = 0;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    for (struct entry *e = entries; left; e++, left >>= DIGIT_BITS)
        for (uint64_t n = left & DIGIT; n; n--)
            take_one(&e->users);
    for (int i = 0; is_alone && i < ENTRIES; i++)
        entries[i].users = 0;
}

void arrivals_forked(void) {
    uses = 0;
    for (int i = 0; i < ENTRIES; i++)
        entries[i].users = 0;
}

/* The daemon makes the table before it stages anything. */
static __attribute__((noinline)) struct table *map_table(void) {
    static const char file[] = "/arriving"; /* ARRIVING_FILE */
    ROOM(char, path);
    struct stat info;
    uint32_t state = page_state();
    if (!path || state == STATE_STARTING || state == STATE_SCANNING || __atomic_exchange_n(&tried, 1, __ATOMIC_RELAXED))
        return NULL;
    node_path(path, file, sizeof file - 1);
    int fd = open_file(path, O_RDWR);
    struct table *found = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size == ARRIVING_BYTES)
        found = mmap(NULL, ARRIVING_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close_file(fd);
    if (found == MAP_FAILED)
        return NULL;
    if (found->magic != ARRIVING_MAGIC || found->rows != ARRIVING_ROWS || found->row_stripes != ROW_STRIPES)
        return NULL;
    __atomic_store_n(&table, found, __ATOMIC_RELEASE);
    return found;
}

static struct table *rows(void) {
    struct table *found = __atomic_load_n(&table, __ATOMIC_ACQUIRE);
    return found ? found : map_table();
}

/* Returns a number that is another one, but for chance, once a row was granted, shown or taken away. */
static uint32_t changes(const struct table *in) {
    uint32_t sum = __atomic_load_n(&anew, __ATOMIC_RELAXED) + 1;
    for (int i = 0; i < ARRIVING_ROWS; i++)
        sum += __atomic_load_n(&in->granted[i], __ATOMIC_RELAXED) + __atomic_load_n(&in->shown[i], __ATOMIC_RELAXED);
    return sum;
}

static int holds(const struct table *in, int row, uint32_t serial) {
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* what was read before was read before the row is looked at */
    return serial && __atomic_load_n(&in->granted[row], __ATOMIC_SEQ_CST) == serial &&
           __atomic_load_n(&in->shown[row], __ATOMIC_SEQ_CST) == serial && page_serves();
}

static int64_t ns_of(struct timespec t) {
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int is_local_file(int fd, uint64_t device, uint64_t inode) {
    struct stat found;
    return fstat(fd, &found) == 0 && found.st_ino == inode && found.st_dev == device;
}

/* Whether a number stands for this file of the source, by what the kernel knows without asking a server. Since Linux 6.11
 * it takes a name that is nowhere as an empty one, in less time. */
static int is_file(int fd, uint64_t device, uint64_t inode) {
#ifdef STATX_INO
    static int needs_name;
    struct statx found;
    int flags = AT_EMPTY_PATH | AT_STATX_DONT_SYNC;
    int known = !needs_name && syscall(SYS_statx, fd, NULL, flags, STATX_INO, &found) == 0;
    if (!known) {
        known = statx && statx(fd, "", flags, STATX_INO, &found) == 0;
        needs_name = known;
    }
    return known && found.stx_ino == inode && makedev(found.stx_dev_major, found.stx_dev_minor) == device;
#else
    return is_local_file(fd, device, inode);
#endif
}

/* ---- incoming files ---- */

/* Closes those whose rows are gone, unless a thread is at them. */
static void let_go(const struct table *in) {
    for (struct entry *e = entries; e < entries + ENTRIES; e++) {
        uint32_t serial = __atomic_load_n(&e->serial, __ATOMIC_SEQ_CST);
        if (!serial || serial == BUSY || __atomic_load_n(&in->granted[e->row], __ATOMIC_SEQ_CST) == serial)
            continue;
        if (!__atomic_compare_exchange_n(&e->serial, &serial, BUSY, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        if (__atomic_load_n(&e->users, __ATOMIC_SEQ_CST)) {
            __atomic_store_n(&e->serial, serial, __ATOMIC_SEQ_CST);
            continue;
        }
        if (fd_kind(e->fd) == FD_ARRIVING && is_local_file(e->fd, e->device, e->inode)) {
            fd_mark(e->fd, FD_OTHER);
            close_file(e->fd);
        }
        __atomic_store_n(&e->serial, 0, __ATOMIC_SEQ_CST);
    }
}

/* The offset of an incoming file, at which nobody reads, tells that its number still stands for it: that is asked in less
 * than half the time of a stat. */
static off_t mark_of(uint32_t serial) {
    return FIRST_MARK + (off_t)serial;
}

static int open_incoming(const struct table *in, int row, uint32_t serial, struct stat *info) {
    char name[1 + ARRIVING_NAME_BYTES] = "/";
    ROOM(char, path);
    if (!path)
        return -1;
    memcpy(name + 1, in->row[row].name, ARRIVING_NAME_BYTES);
    node_path(path, name, sizeof name);
    int low = open_file(path, O_RDONLY | O_NOATIME); /* no read looks whether to note its time */
    if (low < 0 && errno == EPERM) /* not this user's file, as the file system has it */
        low = open_file(path, O_RDONLY);
    int fd = low < 0 ? -1 : fcntl(low, F_DUPFD_CLOEXEC, copy_keeps_at());
    if (low >= 0)
        close_file(low);
    if (fd < 0)
        return -1;
    if (fd < FDS && fstat(fd, info) == 0 && S_ISREG(info->st_mode) && (uint64_t)info->st_size == in->row[row].size &&
        lseek(fd, mark_of(serial), SEEK_SET) == mark_of(serial) && holds(in, row, serial))
        return fd;
    close_file(fd);
    return -1;
}

static struct entry *entry_of(uint32_t serial) {
    for (struct entry *e = entries; e < entries + ENTRIES; e++)
        if (__atomic_load_n(&e->serial, __ATOMIC_SEQ_CST) == serial)
            return e;
    return NULL;
}

/* Returns whether the incoming file of a row is open now. */
static int is_open(const struct table *in, int row, uint32_t serial) {
    struct stat info;
    if (entry_of(serial))
        return 1;
    for (struct entry *e = entries; e < entries + ENTRIES; e++) {
        uint32_t none = 0;
        if (!__atomic_compare_exchange_n(&e->serial, &none, BUSY, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        int fd = open_incoming(in, row, serial, &info);
        if (fd >= 0) {
            copies_locked = 1;
            fd_mark(fd, FD_ARRIVING);
            e->row = row;
            e->fd = fd;
            e->device = info.st_dev;
            e->inode = info.st_ino;
        }
        __atomic_store_n(&e->serial, fd >= 0 ? serial : 0, __ATOMIC_SEQ_CST);
        return fd >= 0;
    }
    return 0;
}

/* ---- the row of an open file ---- */
static int is_of(const struct row *row, const struct stat *info) {
    return S_ISREG(info->st_mode) && row->device == info->st_dev && row->inode == info->st_ino &&
           row->size == (uint64_t)info->st_size && row->mtime == ns_of(info->st_mtim) &&
           row->ctime == ns_of(info->st_ctim);
}

/* Finds the row in which the reads of an open file count, and whether what has arrived of it may be read. */
static __attribute__((noinline)) void look(const struct table *in, int fd, uint32_t now) {
    struct opening *o = &openings[fd];
    struct stat info;
    int flags = fcntl(fd, F_GETFL);
    o->rows_seen = now;
    o->anew = __atomic_load_n(&anew, __ATOMIC_RELAXED);
    __atomic_store_n(&o->arriving, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&o->counting, 0, __ATOMIC_RELAXED);
    let_go(in);
    if (flags < 0 || (flags & (O_ACCMODE | O_DIRECT | O_PATH)) || fstat(fd, &info) != 0)
        return;
    for (int row = 0; row < ARRIVING_ROWS; row++) {
        uint32_t serial = __atomic_load_n(&in->granted[row], __ATOMIC_SEQ_CST);
        if (!serial || in->row[row].inode != info.st_ino || in->row[row].size != (uint64_t)info.st_size)
            continue;
        o->row = (uint32_t)row;
        __atomic_store_n(&o->counting, serial, __ATOMIC_RELAXED);
        if (holds(in, row, serial) && is_of(&in->row[row], &info) && is_open(in, row, serial) && holds(in, row, serial))
            __atomic_store_n(&o->arriving, serial, __ATOMIC_SEQ_CST);
        return;
    }
}

static uint32_t look_if_changed(const struct table *in, int fd) {
    uint32_t now = changes(in);
    if (openings[fd].rows_seen != now)
        look(in, fd, now);
    return __atomic_load_n(&openings[fd].arriving, __ATOMIC_SEQ_CST);
}

/* ---- what readers say ---- */

/* Notes a read. A reader says where it is after every NOTE_EVERY bytes in a row, and that it has jumped. Where several
 * readers have the same place in the row, or threads read at the same time, one of them is followed, or none. */
static void note_read(struct row *row, int fd, uint64_t at, uint64_t bytes) {
    struct opening *o = &openings[fd];
    uint64_t to = at + bytes, before = __atomic_exchange_n(&o->run_to, to, __ATOMIC_RELAXED);
    uint64_t was = __atomic_load_n(&o->run, __ATOMIC_RELAXED), run = before == at ? was + bytes : bytes;
    __atomic_store_n(&o->run, run, __ATOMIC_RELAXED);
    if (!row || (was / NOTE_EVERY == run / NOTE_EVERY && before == at))
        return;
    if (before != at && before < row->size && was > __atomic_load_n(&row->jumped, __ATOMIC_RELAXED))
        __atomic_store_n(&row->jumped, was, __ATOMIC_RELAXED);
    if (was < NOTE_EVERY && run < NOTE_EVERY)
        return;
    struct front *front = &row->fronts[(unsigned)(getpid() + fd) % ROW_READERS];
    __atomic_store_n(&front->run, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&front->at, to, __ATOMIC_RELEASE);
    __atomic_store_n(&front->run, run, __ATOMIC_RELEASE);
}

/* Returns the row in which the reads of an open file count now; NULL: there is none. */
static struct row *counting_row(struct table *in, int fd) {
    struct opening *o = &openings[fd];
    uint32_t serial = __atomic_load_n(&o->counting, __ATOMIC_RELAXED);
    return serial && __atomic_load_n(&in->granted[o->row], __ATOMIC_RELAXED) == serial ? &in->row[o->row] : NULL;
}

/* Only what arrives could have served counts. */
void arrivals_source(int fd, off_t at, uint64_t bytes) {
    struct table *in = at < 0 || (unsigned)fd >= FDS || (hpcstage_vforked && !slot_is_mine()) ? NULL : rows();
    int saved = errno;
    if (!in)
        return;
    look_if_changed(in, fd);
    struct row *row = counting_row(in, fd);
    if (row)
        __atomic_add_fetch(&row->read, bytes, __ATOMIC_RELAXED);
    note_read(row, fd, (uint64_t)at, bytes);
    errno = saved;
}

/* ---- stripes ---- */
static unsigned char stripe_state(const struct table *in, int row, uint64_t stripe) {
    const unsigned char *stripes = (const unsigned char *)in + STRIPES_OFFSET;
    return __atomic_load_n(&stripes[(uint64_t)row * ROW_STRIPES + stripe], __ATOMIC_ACQUIRE);
}

/* Returns where what has arrived from `at` on ends, as far as that is looked at. */
static uint64_t arrived_to(const struct table *in, int row, uint64_t at) {
    uint64_t length = in->row[row].stripe_bytes, size = in->row[row].size;
    if (length < LEAST_STRIPE_BYTES || size > length * ROW_STRIPES)
        return at;
    uint64_t shift = (uint64_t)__builtin_ctzll(length), first = at >> shift, stripe = first;
    while (stripe < first + STRIPES_AT_ONCE && stripe << shift < size && stripe_state(in, row, stripe) == STRIPE_ARRIVED)
        stripe++;
    return stripe == first ? at : stripe << shift < size ? stripe << shift : size;
}

/* Returns the first stripe of a range that has not arrived; UINT64_MAX: there is none. */
static uint64_t first_missing(const struct table *in, int row, uint64_t at, uint64_t bytes) {
    uint64_t length = in->row[row].stripe_bytes;
    if (length < LEAST_STRIPE_BYTES || in->row[row].size > length * ROW_STRIPES)
        return 0;
    for (uint64_t stripe = at / length; stripe <= (at + bytes - 1) / length; stripe++)
        if (stripe_state(in, row, stripe) != STRIPE_ARRIVED)
            return stripe;
    return UINT64_MAX;
}

/* Waits for a stripe that the copier is at. Returns whether all of a range has arrived. */
static int comes(const struct table *in, struct opening *o, int row, uint32_t serial, uint64_t at, uint64_t bytes,
                 uint64_t missing) {
    uint64_t begin = now_ns(), awaited = __atomic_load_n(&o->awaited, __ATOMIC_RELAXED);
    if (awaited && stripe_state(in, row, awaited - 1) != STRIPE_ARRIVED)
        return 0; /* the last wait was in vain, and nothing came since */
    uint64_t since = wait_begin(FD_SOURCE);
    while (missing < ROW_STRIPES && stripe_state(in, row, missing) == STRIPE_COMING && holds(in, row, serial) &&
           now_ns() - begin < MOST_WAIT_NS) {
        pause_100us();
        missing = first_missing(in, row, at, bytes);
    }
    wait_end(FD_SOURCE, since);
    __atomic_store_n(&o->awaited, missing < ROW_STRIPES ? (uint32_t)missing + 1 : 0, __ATOMIC_RELAXED);
    return missing == UINT64_MAX;
}

/* Returns whether all of a range has arrived, or does while a reader waits that goes on where it ended. */
static int is_there(const struct table *in, int fd, int row, uint32_t serial, uint64_t at, uint64_t bytes) {
    struct opening *o = &openings[fd];
    uint64_t missing = first_missing(in, row, at, bytes);
    if (missing == UINT64_MAX)
        return 1;
    int goes_on = __atomic_load_n(&o->run_to, __ATOMIC_RELAXED) == at;
    int is_coming = missing < ROW_STRIPES && stripe_state(in, row, missing) == STRIPE_COMING;
    return goes_on && is_coming && comes(in, o, row, serial, at, bytes, missing);
}

/* ---- reads ---- */
struct read {
    int fd, n, is_own; /* is_own: the list is this library's */
    const struct iovec *parts;
    size_t bytes;
    off_t at;
};

/* Finds out how much a read asks for, by a list that the kernel has read, or that is this library's. */
static int measure(struct read *r) {
    r->bytes = 0;
    if (r->n <= 0 || r->n > MOST_PARTS)
        return 0;
    for (int i = 0; i < r->n; i++) {
        if (r->parts[i].iov_len > SSIZE_MAX - r->bytes)
            return 0;
        r->bytes += r->parts[i].iov_len;
    }
    return r->bytes > 0 && r->at <= INT64_MAX - (off_t)r->bytes;
}

/* A program's list may be nowhere, which the kernel says without a fault, where it finds nothing to read behind the end. */
static int can_measure(const struct read *r, const struct entry *e, uint64_t end) {
    return r->is_own || read_parts(e->fd, r->parts, r->n, 0, (off_t)end) == 0;
}

/* Returns how much there is for a read at `at`. */
static size_t length_at(const struct table *in, const struct entry *e, const struct read *r, uint64_t at) {
    uint64_t size = in->row[e->row].size;
    return at >= size ? 0 : size - at < r->bytes ? size - at : r->bytes;
}

/* Whether what was read of the incoming file is what the source has there, if it had arrived before. */
static int was_right(const struct table *in, const struct entry *e, uint32_t serial) {
    return lseek(e->fd, 0, SEEK_CUR) == mark_of(serial) && holds(in, e->row, serial);
}

/* Reads from the incoming file. Returns whether what was read is what the source has there. */
static int reads_incoming(const struct table *in, const struct entry *e, uint32_t serial, const struct read *r,
                          size_t length) {
    return holds(in, e->row, serial) && first_missing(in, e->row, (uint64_t)r->at, length) == UINT64_MAX &&
           read_parts(e->fd, r->parts, r->n, r->is_own, r->at) == (ssize_t)length && was_right(in, e, serial);
}

static void set_next(int fd, off_t at) {
    struct opening *o = &openings[fd];
    if (!o->is_astray)
        __atomic_store_n(&o->next, (uint64_t)at + 1, __ATOMIC_RELAXED);
}

/* Reads the range before `to`, which was taken from the offset. Whatever is not read of it is given back. */
static ssize_t read_taken(struct table *in, struct entry *e, uint32_t serial, struct read *r, off_t to, int *local) {
    r->at = to - (off_t)r->bytes;
    size_t length = r->bytes;
    *local = length_at(in, e, r, (uint64_t)r->at) == length && reads_incoming(in, e, serial, r, length);
    ssize_t got = *local ? (ssize_t)length : read_parts(r->fd, r->parts, r->n, r->is_own, r->at);
    if (got != (ssize_t)length) {
        int saved = errno;
        lseek(r->fd, (got < 0 ? 0 : got) - (off_t)length, SEEK_CUR);
        errno = saved;
    } else {
        set_next(r->fd, to);
    }
    return got;
}

/* Returns whether the beginning of a read has arrived, where the offset is expected, or all of a read of which is known how
 * much it asks for. `to`: where what has arrived ends. */
static int may_be_there(const struct table *in, const struct entry *e, uint32_t serial, struct read *r, int is_next,
                        uint64_t *to) {
    uint64_t next = is_next ? __atomic_load_n(&openings[r->fd].next, __ATOMIC_RELAXED) : (uint64_t)r->at + 1;
    if (!next || !holds(in, e->row, serial))
        return 0;
    r->at = (off_t)(next - 1);
    *to = arrived_to(in, e->row, next - 1);
    return *to != next - 1 && (!r->is_own || (measure(r) && length_at(in, e, r, next - 1) <= *to - (next - 1)));
}

/* Reads first and asks then: the list is measured after the kernel has read it, and the offset is moved from where it was
 * left. Where it is not there, others move it, too, and are expected to do so again. */
static ssize_t reads_first(struct table *in, struct entry *e, uint32_t serial, struct read *r, int is_next, uint64_t to,
                           int *local) {
    struct opening *o = &openings[r->fd];
    uint64_t at = (uint64_t)r->at;
    ssize_t got = read_parts(e->fd, r->parts, r->n, r->is_own, r->at);
    if (got <= 0 || !measure(r) || (size_t)got != length_at(in, e, r, at) || at + (uint64_t)got > to)
        return NOT_ARRIVED;
    if (!was_right(in, e, serial) || (is_next && (size_t)got != r->bytes))
        return NOT_ARRIVED;
    off_t now = is_next ? lseek(r->fd, got, SEEK_CUR) : 0;
    if (is_next && now != r->at + got) {
        o->is_astray = 1;
        __atomic_store_n(&o->next, 0, __ATOMIC_RELAXED);
        return now < 0 ? NOT_ARRIVED : read_taken(in, e, serial, r, now, local);
    }
    if (is_next)
        set_next(r->fd, now);
    *local = 1;
    return got;
}

/* Returns whether all of a read has arrived by now, or soon. */
static int comes_in_time(struct table *in, struct entry *e, uint32_t serial, struct read *r, int is_next) {
    uint64_t size = in->row[e->row].size;
    r->at = is_next ? lseek(r->fd, 0, SEEK_CUR) : r->at;
    if (r->at < 0 || (uint64_t)r->at >= size || !can_measure(r, e, size) || !measure(r) || !holds(in, e->row, serial))
        return 0;
    size_t length = length_at(in, e, r, (uint64_t)r->at);
    return is_there(in, r->fd, e->row, serial, (uint64_t)r->at, length) && (!is_next || length == r->bytes);
}

static ssize_t reads_then(struct table *in, struct entry *e, uint32_t serial, struct read *r, int is_next, int *local) {
    size_t length = length_at(in, e, r, (uint64_t)r->at);
    if (is_next) {
        off_t to = lseek(r->fd, (off_t)length, SEEK_CUR);
        return to < 0 ? NOT_ARRIVED : read_taken(in, e, serial, r, to, local);
    }
    *local = reads_incoming(in, e, serial, r, length);
    return *local ? (ssize_t)length : NOT_ARRIVED;
}

/* Reads in one of two ways. `to`: where what has arrived ends; 0: all of the read has arrived. */
static ssize_t reads(struct table *in, struct entry *e, uint32_t serial, struct read *r, int is_next, uint64_t to) {
    int saved = errno, local = 0;
    ssize_t got = NOT_ARRIVED;
    uint64_t begin = wait_begin(FD_LOCAL);
    if (fd_kind(r->fd) == FD_SOURCE && is_file(r->fd, in->row[e->row].device, in->row[e->row].inode))
        got = to ? reads_first(in, e, serial, r, is_next, to, &local) : reads_then(in, e, serial, r, is_next, &local);
    uint64_t ns = wait_end(FD_LOCAL, begin);
    if (got > 0) {
        count_read(r->fd, local ? FD_LOCAL : FD_SOURCE, got, r->at, ns);
        if (local) {
            count(COUNTER_ARRIVED_READ_BYTES, (uint64_t)got);
            __atomic_add_fetch(&in->row[e->row].served, (uint64_t)got, __ATOMIC_RELAXED);
            note_read(&in->row[e->row], r->fd, (uint64_t)r->at, (uint64_t)got);
        }
    }
    if (local || got == NOT_ARRIVED)
        errno = saved;
    return got;
}

static ssize_t read_held(struct table *in, struct entry *e, uint32_t serial, struct read *r, int is_next) {
    int saved = errno;
    uint64_t to;
    off_t at = r->at;
    ssize_t got = may_be_there(in, e, serial, r, is_next, &to) ? reads(in, e, serial, r, is_next, to) : NOT_ARRIVED;
    if (got != NOT_ARRIVED)
        return got;
    r->at = at;
    if (comes_in_time(in, e, serial, r, is_next))
        got = reads(in, e, serial, r, is_next, 0);
    if (got == NOT_ARRIVED)
        errno = saved;
    return got;
}

static ssize_t read_arrived(struct read *r, int is_next) {
    struct table *in = rows();
    if (!in || (hpcstage_vforked && !slot_is_mine()))
        return NOT_ARRIVED;
    struct opening *o = &openings[r->fd];
    uint32_t serial = __atomic_load_n(&o->arriving, __ATOMIC_SEQ_CST);
    struct entry *e = serial ? entry_of(serial) : NULL;
    if (!e || o->anew != __atomic_load_n(&anew, __ATOMIC_RELAXED) || !(++reads_since % LOOK_EVERY)) {
        serial = look_if_changed(in, r->fd);
        e = serial ? entry_of(serial) : NULL;
    }
    if (!e)
        return NOT_ARRIVED;
    use_begins(e);
    ssize_t got = NOT_ARRIVED;
    if (__atomic_load_n(&e->serial, __ATOMIC_SEQ_CST) == serial)
        got = read_held(in, e, serial, r, is_next);
    use_ends(e);
    if (got == NOT_ARRIVED && !holds(in, e->row, serial))
        look_if_changed(in, r->fd);
    return got;
}

/* The copy's turn comes first: who can go on with it does. A thread can be cancelled before it reads, as in any read, and
 * not between the steps. */
static ssize_t arrived(struct read *r, int is_next) {
    int saved = errno;
    if (moved_kind(r->fd, FD_SOURCE) != FD_SOURCE)
        return NOT_ARRIVED;
    pthread_testcancel();
    ssize_t got = read_arrived(r, is_next);
    if (got != NOT_ARRIVED)
        return got;
    if (is_next && __atomic_load_n(&openings[r->fd].next, __ATOMIC_RELAXED))
        __atomic_store_n(&openings[r->fd].next, 0, __ATOMIC_RELAXED);
    errno = saved;
    return NOT_ARRIVED;
}

void arrivals_seeked(int fd, off_t to) {
    if (to >= 0)
        set_next(fd, to);
}

ssize_t arrived_at(int fd, const struct iovec *parts, int n, int is_own, off_t at) {
    struct read r = {fd, n, is_own, parts, 0, at};
    return at < 0 ? NOT_ARRIVED : arrived(&r, 0);
}

ssize_t arrived_next(int fd, const struct iovec *parts, int n, int is_own) {
    struct read r = {fd, n, is_own, parts, 0, -1};
    return arrived(&r, 1);
}
