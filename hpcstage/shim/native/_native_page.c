/* Owns this process's slot in the shared page: counters, histograms, and the daemon's state word.
 *
 * A process takes a slot of a process that has ended, which the daemon has marked as free, else the next one that
 * nobody has used; where there is none, it shares slot 0. A slot whose process is killed while it takes it is lost for
 * the run. Without a page (it cannot be mapped, or this is a test of the module alone) everything is counted in private
 * memory.
 */
#include "_native.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

#define MOST_MOVES 1000 /* into places: a call waits for no more */

struct slot {
    uint32_t pid, layer, python, parent;
    uint64_t attach_ns, pid_space, reserved[4], counters[COUNTERS];
    uint32_t hist_open[HIST_BUCKETS], hist_read[HIST_BUCKETS];
};
_Static_assert(offsetof(struct slot, pid_space) == PID_SPACE_OFFSET, "pid_space");
_Static_assert(offsetof(struct slot, counters) == COUNTERS_OFFSET, "counters");
_Static_assert(offsetof(struct slot, hist_open) == HIST_OPEN_OFFSET, "hist_open");
_Static_assert(offsetof(struct slot, hist_read) == HIST_READ_OFFSET, "hist_read");

static struct slot nowhere;
static char *page;
static uint32_t unlogged, unchanged;
uint32_t *page_logging = &unlogged, *page_published = &unchanged, *page_voided = &unchanged;
static pid_t owner; /* of this memory: differs from getpid() between vfork and exec, and after _Fork or clone */

/* Holds all that only this process knows. The kernel empties it in every forked child, also in one of _Fork or clone, which no
 * handler is told of: such a child takes a slot of its own. Before Linux 4.14 it counts into the slot of its parent, and,
 * once that has ended, for whoever has the slot next. So does a child that shares the memory (CLONE_VM) and outlives. */
static struct own {
    struct slot *slot;              /* NULL: to be claimed at the first count */
    uint32_t inside, inside_source; /* threads inside calls on dataset files: all, and those that wait for the source */
    uint32_t held;                  /* threads inside calls that only hold their file under its number */
} first, *own = &first;

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void count_calls(void);

static void empty_in_children(void) {
    void *at = mmap(NULL, sizeof *own, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return;
    if (madvise(at, sizeof *own, MADV_WIPEONFORK) == 0)
        own = at;
    else
        munmap(at, sizeof *own);
}

int page_map(const char *path) {
    struct stat info;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return errno;
    void *at = MAP_FAILED;
    int problem = EINVAL;
    if (fstat(fd, &info) == 0 && info.st_size >= PAGE_BYTES) {
        at = mmap(NULL, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        problem = at == MAP_FAILED ? errno : 0;
    }
    close(fd);
    if (problem)
        return problem;
    if (*(uint64_t *)at != PAGE_MAGIC || *(uint32_t *)((char *)at + 8) != VERSION) {
        munmap(at, PAGE_BYTES);
        return EPROTO;
    }
    page = at;
    page_logging = (uint32_t *)(page + LOGGING_OFFSET);
    page_published = (uint32_t *)(page + PUBLISHED_OFFSET);
    page_voided = (uint32_t *)(page + VOIDED_OFFSET);
    owner = getpid();
    empty_in_children();
    count_calls();
    return 0;
}

uint32_t page_state(void) {
    return page ? __atomic_load_n((uint32_t *)(page + STATE_OFFSET), __ATOMIC_RELAXED) : STATE_SETTLED;
}

static uint32_t *gate(int word) {
    return page ? (uint32_t *)(page + GATE_OFFSET) + word : NULL;
}

int page_serves(void) {
    if (!page)
        return 1;
    return __atomic_load_n(gate(GIVEN_UP), __ATOMIC_ACQUIRE) == __atomic_load_n(gate(CAUGHT_UP), __ATOMIC_RELAXED) &&
           !__atomic_load_n(gate(CLOSED), __ATOMIC_RELAXED) && !__atomic_load_n(gate(HELD), __ATOMIC_RELAXED);
}

void page_give_up(void) {
    static uint32_t serial;
    uint64_t own = now_ns() ^ (uint64_t)getpid() << 40 ^ (uint64_t)__atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED) << 20;
    if (page)
        __atomic_store_n(gate(GIVEN_UP), (uint32_t)(own * 0x9e3779b97f4a7c15ull >> 32) | 1, __ATOMIC_SEQ_CST);
}

void page_close(void) {
    if (page)
        __atomic_store_n(gate(CLOSED), 1, __ATOMIC_SEQ_CST);
}

int page_is_closed(void) {
    return page && __atomic_load_n(gate(CLOSED), __ATOMIC_RELAXED);
}

int page_may_hold(uint64_t device) {
    uint64_t theirs = page ? __atomic_load_n((uint64_t *)(page + DEVICE_OFFSET), __ATOMIC_RELAXED) : 0;
    return !theirs || theirs == device;
}

int page_is_unlinked(void) {
    return page && __atomic_load_n((uint32_t *)(page + LINKED_OFFSET), __ATOMIC_RELAXED) == UNLINKED;
}

static struct slot *slot_at(uint32_t index) {
    return page ? (struct slot *)(page + PAGE_HEADER_BYTES + (size_t)index * SLOT_BYTES) : &nowhere;
}

static void give_back(uint32_t index) {
    __atomic_store_n(page + FREE_OFFSET + index, SLOT_FREE, __ATOMIC_RELEASE);
}

static uint32_t free_index(void) {
    char *first = page + FREE_OFFSET, *end = first + PYTHON_SLOTS_FROM;
    for (char *at = first; at < end && (at = memchr(at, SLOT_FREE, (size_t)(end - at))); at++) {
        char found = SLOT_FREE;
        if (__atomic_compare_exchange_n(at, &found, 0, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return (uint32_t)(at - first);
    }
    return 0;
}

static uint32_t next_index(void) {
    uint32_t *next = (uint32_t *)(page + NEXT_NATIVE_OFFSET);
    if (__atomic_load_n(next, __ATOMIC_RELAXED) >= PYTHON_SLOTS_FROM)
        return 0;
    uint32_t index = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
    return index < PYTHON_SLOTS_FROM ? index : 0;
}

static uint64_t pid_space(void) {
    struct stat info;
    int saved = errno, known = stat("/proc/self/ns/pid", &info) == 0;
    errno = saved;
    return known ? info.st_ino : 0;
}

static struct slot *claim(void) {
    uint32_t index = page ? free_index() : 0;
    if (page && !index)
        index = next_index();
    struct slot *none = NULL, *slot = slot_at(index);
    if (!__atomic_compare_exchange_n(&own->slot, &none, slot, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        if (index)
            give_back(index);
        return none;
    }
    slot->layer = LAYER_NATIVE;
    slot->python = config.python_version;
    if (!index) {
        slot->counters[COUNTER_READS_MEASURED] = 1;
        __atomic_fetch_add(&slot->counters[COUNTER_SHARERS], 1, __ATOMIC_RELAXED);
        return slot;
    }
    slot->parent = (uint32_t)getppid();
    slot->pid_space = pid_space();
    slot->attach_ns = now_ns();
    slot->counters[COUNTER_READS_MEASURED] = 1;
    __atomic_store_n(&slot->pid, (uint32_t)getpid(), __ATOMIC_RELEASE);
    return slot;
}

static inline struct slot *my_slot(void) {
    struct slot *slot = __atomic_load_n(&own->slot, __ATOMIC_RELAXED);
    return slot ? slot : claim();
}

void slot_claim(void) {
    my_slot();
}

void slot_forget(void) {
    own->slot = NULL;
    waits_forget();
    owner = getpid();
}

int slot_number(void) {
    struct slot *slot = my_slot();
    return page ? (int)(((char *)slot - page - PAGE_HEADER_BYTES) / SLOT_BYTES) : -1;
}

uint32_t slot_pid(void) {
    return my_slot()->pid;
}

int slot_is_mine(void) {
    return owner == getpid();
}

/* Returns the number behind the first blank of a file of the kernel; 0 where there is none. */
static uint64_t number_in(const char *path) {
    char text[96];
    int saved = errno, fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    errno = saved;
    uint64_t value = 0;
    ssize_t at = 0;
    while (at < n && text[at] != ' ')
        at++;
    for (at++; at < n && text[at] >= '0' && text[at] <= '9'; at++)
        value = 10 * value + (uint64_t)(text[at] - '0');
    return value;
}

/* Returns what this process has read itself, by the kernel's counters. That of the process holds also what its reaped
 * children have read; where it has some, it is what the main thread has read. It takes no memory, as _exit may be called
 * from a handler of a signal. */
static uint64_t own_read_bytes(void) {
    struct rusage children;
    char path[48] = "/proc/self/io";
    if (getrusage(RUSAGE_CHILDREN, &children) < 0 || children.ru_maxrss) {
        memcpy(path, "/proc/self/task/", 16);
        memcpy(put_number(path + 16, (unsigned)getpid()), "/io", 4);
    }
    return number_in(path);
}

void slot_finish(void) {
    if (!own->slot || own->slot == slot_at(0) || !slot_is_mine())
        return;
    counter_set(COUNTER_EXIT_NS, now_ns());
    counter_set(COUNTER_OWN_READ_BYTES, own_read_bytes());
}

static inline void add(struct slot *slot, int counter, uint64_t value) {
    __atomic_fetch_add(&slot->counters[counter], value, __ATOMIC_RELAXED);
}

void count(int counter, uint64_t value) {
    add(my_slot(), counter, value);
}

void counter_set(int counter, uint64_t value) {
    __atomic_store_n(&my_slot()->counters[counter], value, __ATOMIC_RELAXED);
}

void counter_max(int counter, uint64_t value) {
    uint64_t *at = &my_slot()->counters[counter], old = __atomic_load_n(at, __ATOMIC_RELAXED);
    while (old < value && !__atomic_compare_exchange_n(at, &old, value, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

uint64_t counter_get(int counter) {
    return __atomic_load_n(&my_slot()->counters[counter], __ATOMIC_RELAXED);
}

/* ---- threads inside calls ---- */

/* The calls that a thread is inside are counted in a value of its own, too, by a digit for each kind: one that is cancelled
 * there, or that jumps out of there from a handler of a signal, is not inside any more. The value lies where the C library
 * has it for each thread from its start on, so that nobody takes memory for it; that it ends with the thread is told by a
 * key, whose values the C library keeps in the same way for the first ones. */
#define KEYS_IN_PLACE 32
#define DIGIT_BITS (8 * sizeof(uintptr_t) / 3)
#define DIGIT (((uintptr_t)1 << DIGIT_BITS) - 1)
enum { OF_LOCAL = 0, OF_SOURCE = DIGIT_BITS, OF_HELD = 2 * DIGIT_BITS }; /* where the digit is */
#define IS_TOLD ((uintptr_t)1 << (8 * sizeof(uintptr_t) - 1)) /* its end will be */
static __attribute__((tls_model("initial-exec"))) _Thread_local uintptr_t inside;
static pthread_key_t ends;
static int has_ends;
static uint32_t threads_seen; /* at their first call; without a key, at each */

static __attribute__((noinline)) void tell_end(void) {
    __atomic_add_fetch(&threads_seen, 1, __ATOMIC_RELAXED);
    if (has_ends && pthread_setspecific(ends, &inside) == 0)
        inside |= IS_TOLD;
}

/* These stand next to what they count: between both a handler of a signal would find one done and not the other. */
static inline void call_begins(int digit) {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    if (__builtin_expect(!(inside & IS_TOLD), 0))
        tell_end();
    inside += (uintptr_t)1 << digit;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

/* Returns whether the call was counted until now. */
static inline int call_ends(int digit) {
    if (!(inside >> digit & DIGIT))
        return 0;
    inside -= (uintptr_t)1 << digit;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    return 1;
}

static void leave(int is_source, uint64_t now) {
    if (is_source && take_one(&own->inside_source) == 0)
        count(COUNTER_BLOCKED_SOURCE_NS, now);
    if (take_one(&own->inside) == 0) {
        count(COUNTER_BLOCKED_NS, now);
        counter_set(COUNTER_LAST_NS, now);
    }
}

static void close_time(int counter) {
    if ((int64_t)counter_get(counter) < 0) /* since then */
        count(counter, now_ns());
}

/* A jump may come between a count and its digit: the only thread that was ever here knows that nobody is inside. */
static void left_alone(void) {
    own->inside = own->inside_source = own->held = 0;
    if (!own->slot)
        return;
    close_time(COUNTER_BLOCKED_SOURCE_NS);
    close_time(COUNTER_BLOCKED_NS);
}

void waits_left(void) {
    int is_alone = __atomic_load_n(&threads_seen, __ATOMIC_RELAXED) == 1 && (inside & IS_TOLD);
    arrivals_left(is_alone);
    uintptr_t left = inside;
    inside &= IS_TOLD;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    for (uintptr_t n = left >> OF_LOCAL & DIGIT; n; n--)
        leave(0, now_ns());
    for (uintptr_t n = left >> OF_SOURCE & DIGIT; n; n--)
        leave(1, now_ns());
    for (uintptr_t n = left >> OF_HELD & DIGIT; n; n--)
        take_one(&own->held);
    if (is_alone)
        left_alone();
}

static void thread_ends(void *ignored) {
    waits_left();
    rooms_left();
}

static void count_calls(void) {
    if (has_ends || pthread_key_create(&ends, thread_ends) != 0)
        return;
    has_ends = ends < KEYS_IN_PLACE;
    if (!has_ends)
        pthread_key_delete(ends);
}

void waits_forget(void) {
    own->inside = own->inside_source = own->held = 0;
    inside &= IS_TOLD;
    threads_seen = inside != 0;
}

int waits_none(void) {
    return __atomic_load_n(&own->inside, __ATOMIC_SEQ_CST) == 0;
}

int holds_any(void) {
    return __atomic_load_n(&own->held, __ATOMIC_SEQ_CST) != 0;
}

void hold_begin(void) {
    __atomic_add_fetch(&own->held, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < MOST_MOVES && __builtin_expect(__atomic_load_n(&copies_moving, __ATOMIC_SEQ_CST) != 0, 0); i++) {
        __atomic_sub_fetch(&own->held, 1, __ATOMIC_SEQ_CST);
        copies_wait();
        __atomic_add_fetch(&own->held, 1, __ATOMIC_SEQ_CST);
    }
    call_begins(OF_HELD);
}

void hold_end(void) {
    if (call_ends(OF_HELD))
        take_one(&own->held);
}

/* The first one in takes the time from the counter, the last one out adds it: whatever the order in which threads come
 * to these lines, the sum is the time between. */
uint64_t wait_begin(int kind) {
    struct slot *slot = my_slot();
    uint64_t now = now_ns();
    uint32_t threads = __atomic_add_fetch(&own->inside, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < MOST_MOVES && __builtin_expect(__atomic_load_n(&copies_moving, __ATOMIC_SEQ_CST) != 0, 0); i++) {
        __atomic_sub_fetch(&own->inside, 1, __ATOMIC_SEQ_CST);
        copies_wait();
        threads = __atomic_add_fetch(&own->inside, 1, __ATOMIC_SEQ_CST);
    }
    call_begins(kind == FD_SOURCE ? OF_SOURCE : OF_LOCAL);
    if (threads == 1)
        count(COUNTER_BLOCKED_NS, 0 - now);
    if (threads > __atomic_load_n(&slot->counters[COUNTER_READERS], __ATOMIC_RELAXED))
        counter_max(COUNTER_READERS, threads);
    if (kind == FD_SOURCE && __atomic_add_fetch(&own->inside_source, 1, __ATOMIC_RELAXED) == 1)
        count(COUNTER_BLOCKED_SOURCE_NS, 0 - now);
    return now;
}

uint64_t wait_end(int kind, uint64_t begin) {
    uint64_t now = now_ns();
    if (call_ends(kind == FD_SOURCE ? OF_SOURCE : OF_LOCAL))
        leave(kind == FD_SOURCE, now);
    return now - begin;
}

unsigned bucket_of_ns(uint64_t value) {
    if (value < 1024)
        return 0;
    unsigned top = 63u - (unsigned)__builtin_clzll(value);
    unsigned bucket = 1 + 4 * (top - 10) + (unsigned)(value >> (top - 2) & 3);
    return bucket < HIST_BUCKETS ? bucket : HIST_BUCKETS - 1;
}

void count_source_open(uint64_t ns, int reason) {
    struct slot *slot = my_slot();
    count(COUNTER_SOURCE_OPENS, 1);
    count(COUNTER_SOURCE_OPEN_NS, ns);
    if (reason != REASON_NONE)
        count(COUNTER_DIRECT_BASE + reason, 1);
    __atomic_fetch_add(&slot->hist_open[bucket_of_ns(ns)], 1, __ATOMIC_RELAXED);
}

void count_read(int fd, int kind, ssize_t bytes, off_t at, uint64_t ns) {
    if (bytes <= 0)
        return;
    struct slot *slot = my_slot();
    int base = kind == FD_SOURCE ? COUNTER_SOURCE_READS : COUNTER_LOCAL_READS;
    add(slot, base, 1);
    add(slot, base + 1, (uint64_t)bytes);
    add(slot, base + 2, ns);
    if (moved_is(fd, kind))
        count(COUNTER_MOVED_READ_BYTES, (uint64_t)bytes);
    if (kind == FD_SOURCE) {
        arrivals_source(fd, at, (uint64_t)bytes);
        __atomic_fetch_add(&my_slot()->hist_read[bucket_of_ns(ns)], 1, __ATOMIC_RELAXED);
    }
}
