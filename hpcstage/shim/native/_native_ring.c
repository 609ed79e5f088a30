/* Writes the ring of opens: which dataset files this process opened, in order.
 *
 * A slot's ring is made when there is first something to log. A record's place is reserved by one exchange on the head;
 * its stamp is stored last and says that it is complete. Nobody waits for anybody: a reader that is more than a whole
 * ring behind has lost records, and a thread that comes while another makes the ring does not log.
 */
#include "_native.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

struct ring {
    uint64_t magic, head; /* head: bytes ever reserved */
    uint32_t data_bytes, pid;
    uint64_t reserved[5];
    unsigned char data[RING_DATA_BYTES];
};
_Static_assert(offsetof(struct ring, head) == RING_HEAD_OFFSET, "head");
_Static_assert(offsetof(struct ring, data) == RING_HEADER_BYTES, "data");

struct record {
    uint32_t stamp;
    uint16_t payload_n;
    uint8_t type, reserved;
    uint64_t ns;
};
_Static_assert(sizeof(struct record) == RECORD_BYTES, "record");

#define PAD_BYTES 8 /* what a PAD record needs at least: it ends before `ns` */

static struct ring *ring;
static int tried;

/* ---- making it ---- */
static void name_of(int slot, char *out) {
    char name[32] = "/opens/", *end = put_number(name + 7, (unsigned)slot);
    memcpy(end, ".ring", 5);
    node_path(out, name, (size_t)(end + 5 - name));
}

/* The blocks are allocated at once: a store into a hole on a disk that has filled up since would be SIGBUS, and beyond
 * the limit on file sizes SIGXFSZ. */
static struct ring *made(const char *path) {
    struct rlimit most;
    if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < sizeof(struct ring))
        return NULL;
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return NULL;
    void *at = MAP_FAILED;
    if (posix_fallocate(fd, 0, sizeof(struct ring)) == 0)
        at = mmap(NULL, sizeof(struct ring), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED)
        unlink(path);
    close(fd);
    return at == MAP_FAILED ? NULL : at;
}

static __attribute__((noinline)) struct ring *make(void) {
    ROOM(char, path);
    int saved = errno, slot = slot_number();
    if (!path || slot <= 0 || __atomic_exchange_n(&tried, 1, __ATOMIC_RELAXED))
        return NULL;
    name_of(slot, path);
    struct ring *new = made(path);
    errno = saved;
    if (!new)
        return NULL;
    new->data_bytes = RING_DATA_BYTES;
    new->pid = slot_pid();
    __atomic_store_n(&new->magic, RING_MAGIC, __ATOMIC_RELEASE);
    __atomic_store_n(&ring, new, __ATOMIC_RELEASE);
    return new;
}

static inline struct ring *my_ring(void) {
    struct ring *mine = __atomic_load_n(&ring, __ATOMIC_ACQUIRE);
    return mine || __atomic_load_n(&tried, __ATOMIC_RELAXED) ? mine : make();
}

/* The parent's stays mapped: the fork may have come out of a signal handler, in the middle of a record. */
void ring_forget(void) {
    __atomic_store_n(&ring, NULL, __ATOMIC_RELAXED);
    __atomic_store_n(&tried, 0, __ATOMIC_RELAXED);
}

/* ---- writing ---- */
static struct record *record_at(struct ring *r, uint64_t at) {
    return (struct record *)(r->data + at % RING_DATA_BYTES);
}

static void commit(struct ring *r, uint64_t at) {
    __atomic_store_n(&record_at(r, at)->stamp, (uint32_t)at + 1, __ATOMIC_RELEASE);
}

static void pad(struct ring *r, uint64_t at) {
    struct record *to = record_at(r, at);
    to->payload_n = 0;
    to->type = RECORD_PAD;
    to->reserved = 0;
    commit(r, at);
}

/* Reserves `bytes` bytes and returns their position. */
static uint64_t reserve(struct ring *r, uint64_t bytes) {
    uint64_t skip, head = __atomic_load_n(&r->head, __ATOMIC_RELAXED);
    do {
        uint64_t left = RING_DATA_BYTES - head % RING_DATA_BYTES;
        skip = left < bytes ? left : 0;
    } while (!__atomic_compare_exchange_n(&r->head, &head, head + skip + bytes, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    __atomic_thread_fence(__ATOMIC_RELEASE); /* a reader of what is written from here on sees the new head */
    if (skip)
        pad(r, head);
    return head + skip;
}

void ring_opened(const struct place *at, uint64_t ns) {
    struct ring *r = my_ring();
    if (!r)
        return;
    const char *name = at->local + at->map->name_at;
    size_t n = strlen(name);
    uint64_t begin = reserve(r, (sizeof(struct record) + n + PAD_BYTES - 1) & ~(uint64_t)(PAD_BYTES - 1));
    struct record *to = record_at(r, begin);
    to->payload_n = (uint16_t)n;
    to->type = RECORD_OPEN;
    to->reserved = 0;
    to->ns = ns;
    memcpy(to + 1, name, n);
    commit(r, begin);
}
