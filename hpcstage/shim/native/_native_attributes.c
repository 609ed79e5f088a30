/* Answers stat of a copy with the attributes of the source, from the table that the daemon keeps beside the store.
 *
 * A row is found by the copy's inode, and is valid while the copy's time of change is the one in it. If a copy has no
 * row (it came a moment ago, or there is no table), the source itself is asked.
 */
#include "_native.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

struct row {
    uint64_t copy;
    int64_t copy_ctime;
    uint64_t device, inode;
    int64_t ctime;
    uint32_t mode, links, uid, gid;
    uint64_t reserved;
};
_Static_assert(sizeof(struct row) == ATTRIBUTES_ROW_BYTES, "row");

struct table {
    uint64_t magic, rows, device, reserved[5];
    struct row row[];
};
_Static_assert(offsetof(struct table, row) == ATTRIBUTES_HEADER_BYTES, "rows");

static struct table *table;
static int tried;

/* The daemon makes the table before it stages anything. */
static __attribute__((noinline)) struct table *map_table(void) {
    ROOM(char, path);
    struct stat info;
    uint32_t state = page_state();
    if (!path || state == STATE_STARTING || state == STATE_SCANNING || __atomic_exchange_n(&tried, 1, __ATOMIC_RELAXED))
        return NULL;
    int saved = errno;
    node_path(path, "/attributes", 11);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    struct table *found = MAP_FAILED;
    if (fd >= 0 && fstat(fd, &info) == 0 && info.st_size >= (off_t)sizeof *found)
        found = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    errno = saved;
    if (found == MAP_FAILED)
        return NULL;
    uint64_t rows = found->rows;
    if (found->magic != ATTRIBUTES_MAGIC || rows < 2 || (rows & (rows - 1)) ||
        sizeof *found + rows * sizeof(struct row) > (uint64_t)info.st_size)
        return NULL;
    __atomic_store_n(&table, found, __ATOMIC_RELEASE);
    return found;
}

static int64_t ns_of(struct timespec t) {
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static struct timespec time_of(int64_t ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    if (t.tv_nsec < 0) {
        t.tv_sec--;
        t.tv_nsec += 1000000000;
    }
    return t;
}

/* Reads a copy of the row, which the daemon may be writing: the daemon takes the inode away meanwhile. */
static int find_row(uint64_t device, uint64_t inode, int64_t ctime, struct row *out) {
    const struct table *in = __atomic_load_n(&table, __ATOMIC_ACQUIRE);
    if (!in && !(in = map_table()))
        return 0;
    if (device != in->device)
        return 0;
    uint64_t first = inode * ATTRIBUTES_FACTOR >> (__builtin_clzll(in->rows) + 1);
    for (unsigned probe = 0; probe < ATTRIBUTES_PROBES; probe++) {
        const struct row *row = &in->row[(first + probe) & (in->rows - 1)];
        if (__atomic_load_n(&row->copy, __ATOMIC_ACQUIRE) != inode || row->copy_ctime != ctime)
            continue;
        *out = *row;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        return __atomic_load_n(&row->copy, __ATOMIC_RELAXED) == inode && out->copy_ctime == ctime;
    }
    return 0;
}

int attributes_put(struct stat *info) {
    struct row row;
    if (!find_row(info->st_dev, info->st_ino, ns_of(info->st_ctim), &row))
        return 0;
    info->st_dev = row.device;
    info->st_ino = row.inode;
    info->st_mode = row.mode;
    info->st_nlink = row.links;
    info->st_uid = row.uid;
    info->st_gid = row.gid;
    info->st_ctim = time_of(row.ctime);
    return 1;
}

static int same_content(const struct stat *a, const struct stat *b) {
    return S_ISREG(a->st_mode) && S_ISREG(b->st_mode) && a->st_size == b->st_size &&
           ns_of(a->st_mtim) == ns_of(b->st_mtim);
}

/* Whether an open source is the file of an open copy: the very same, as far as that is known, else one that looks so. */
int attributes_same(int fd, int source) {
    struct stat copy, now;
    if (fstat(fd, &copy) != 0 || fstat(source, &now) != 0 || !S_ISREG(now.st_mode))
        return 0;
    int looks_so = same_content(&copy, &now);
    return attributes_put(&copy) ? copy.st_ino == now.st_ino && copy.st_dev == now.st_dev : looks_so;
}

int attributes_equal(int fd, const struct stat *source) {
    struct stat copy;
    return fstat(fd, &copy) == 0 && attributes_put(&copy) && same_content(&copy, source) &&
           copy.st_dev == source->st_dev && copy.st_ino == source->st_ino && copy.st_mode == source->st_mode &&
           copy.st_nlink == source->st_nlink && copy.st_uid == source->st_uid && copy.st_gid == source->st_gid &&
           ns_of(copy.st_ctim) == ns_of(source->st_ctim);
}

/* Answers fstat of a copy that is open. Where nothing better is known the answer stays as it is. */
static __attribute__((noinline)) void put_for(int fd, struct stat *info) {
    struct stat now;
    if (attributes_put(info))
        return;
    ROOM(char, source);
    int saved = errno;
    if (source && copy_source(fd, source)) {
        count(COUNTER_SOURCE_STATS, 1);
        if (stat(source, &now) == 0 && same_content(info, &now))
            *info = now;
    }
    errno = saved;
}

int attributes_result(int result, int fd, void *info) {
    if (result == 0 && fd_kind(fd) == FD_LOCAL)
        put_for(fd, info);
    return result;
}

int attributes_of_named(const char *path, struct stat *info) {
    int fd = copy_named(path);
    if (fd < 0 || fstat(fd, info) != 0)
        return 0;
    put_for(fd, info);
    return 1;
}

#ifdef STATX_TYPE
/* Returns 0 if the source must be asked. */
int attributes_put_x(struct statx *info) {
    struct row row;
    uint64_t device = makedev(info->stx_dev_major, info->stx_dev_minor);
    int64_t ctime = info->stx_ctime.tv_sec * 1000000000ll + info->stx_ctime.tv_nsec;
    if (!find_row(device, info->stx_ino, ctime, &row))
        return 0;
    struct timespec changed = time_of(row.ctime);
    info->stx_dev_major = major(row.device);
    info->stx_dev_minor = minor(row.device);
    info->stx_ino = row.inode;
    info->stx_mode = (uint16_t)row.mode;
    info->stx_nlink = row.links;
    info->stx_uid = row.uid;
    info->stx_gid = row.gid;
    info->stx_ctime.tv_sec = changed.tv_sec;
    info->stx_ctime.tv_nsec = (uint32_t)changed.tv_nsec;
    info->stx_mask &= STATX_BASIC_STATS;
    return 1;
}
#endif
