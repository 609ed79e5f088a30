/*
 * slowfs: a FUSE file system that shows a directory as slow, contended shared storage.
 *
 * Owns: the pass-through of a directory, the model of the storage, its counters, and the end of the mount when whoever
 * started it dies. It does not choose any setting: they lie in the state file and may change while it is mounted.
 *
 * Usage: slowfs SOURCE MOUNTPOINT STATE [-o OPTION,...]     runs in the foreground until SIGTERM
 *   node=N      which node of the cluster this mount is (0 to 7); mounts that name one state file share the storage
 *   keep=1      keep the page cache across opens (default: an open drops the file's pages)
 *   and libfuse's own options, such as allow_other
 *
 * The model. The storage moves `bandwidth` bytes per second. Nodes with requests outstanding share it by their weights,
 * whatever the number of their requests, as fair queueing by client does; the requests of one node are served first
 * come, first served. Each data request takes `data_latency` besides, each metadata operation `metadata_latency`. It is a
 * model: no stripes, no locks, no read-ahead of a server, no slow tail.
 *
 * The state file: see `struct state`; all fields are native 64-bit integers.
 */
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS 1000000000L
#define BURST_NS 2000000L          /* credit that an idle clock keeps */
#define STALE_NS (600 * SECOND_NS) /* a clock this far ahead is from before a reboot */
#define STOP_MS 2000               /* how long the guard waits for an orderly end of the server */
#define NODES 8
#define WEIGHT_ONE 1000

enum counter { LOOKUPS, OPENS, LISTINGS, READS, READ_BYTES, WRITES, WRITE_BYTES, OTHERS, COUNTERS };

struct node {
    _Atomic long clock; /* when the last byte booked by this node has been moved */
    _Atomic long weight;
    _Atomic long ready; /* pid of the server while it is mounted */
    _Atomic long spare;
    _Atomic long counters[COUNTERS];
};

struct state {
    _Atomic long bandwidth;        /* bytes per second; 0: unlimited */
    _Atomic long metadata_latency; /* ns */
    _Atomic long data_latency;     /* ns */
    _Atomic long spare[5];
    struct node nodes[NODES];
};

static struct {
    int node, keep;
} conf;
static struct state *state;
static struct node *self;
static int base; /* the source directory */

struct handle {
    int fd;
    DIR *dir;
};
#define HANDLE(fi) ((struct handle *)(uintptr_t)(fi)->fh)

/*
 * libfuse before 3.17 never sends FUSE_PARALLEL_DIROPS (libfuse PR 861), and the kernel then serialises all cold
 * lookups in one directory: concurrency on small files would not show. So the bit is set in the INIT reply.
 */
ssize_t writev(int fd, const struct iovec *v, int n)
{
    static int done;

    if (!done && n == 2 && v[0].iov_len == 16 && v[1].iov_len == 64) { /* fuse_out_header, fuse_init_out */
        done = 1;
        ((unsigned *)v[1].iov_base)[3] |= 1u << 18;
    }
    return syscall(SYS_writev, fd, v, n);
}

/* ---- the model ---- */

static long now_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * SECOND_NS + t.tv_nsec;
}

static void sleep_until(long t)
{
    struct timespec s = {t / SECOND_NS, t % SECOND_NS};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &s, NULL) == EINTR)
        ;
}

/* Books cost on a virtual clock; returns when the booked time ends. */
static long reserve(_Atomic long *clock, long cost, long now)
{
    long old = atomic_load(clock), end;

    do
        end = (old > now - BURST_NS ? old : now - BURST_NS) + cost;
    while (!atomic_compare_exchange_weak(clock, &old, end));
    return end;
}

/* This node's share of the bandwidth: its weight among the nodes that have requests outstanding. */
static double share(long now)
{
    double mine = (double)atomic_load(&self->weight), all = mine;

    for (struct node *n = state->nodes; n < state->nodes + NODES; n++)
        if (n != self && atomic_load(&n->clock) > now)
            all += (double)atomic_load(&n->weight);
    return mine / all;
}

static void count(enum counter which, long by) { atomic_fetch_add(&self->counters[which], by); }

static void data_cost(long bytes)
{
    long now = now_ns(), t = now, bandwidth = atomic_load(&state->bandwidth);

    if (bandwidth)
        t = reserve(&self->clock, (long)((double)bytes * SECOND_NS / ((double)bandwidth * share(now))), now);
    if (t < now)
        t = now;
    t += atomic_load(&state->data_latency);
    if (t > now)
        sleep_until(t);
}

static void metadata_cost(enum counter which)
{
    long latency = atomic_load(&state->metadata_latency);

    count(which, 1);
    if (latency)
        sleep_until(now_ns() + latency);
}

/* ---- the file system; a path is NULL where the file is open (nullpath_ok) ---- */

static const char *rel(const char *path) { return path[1] ? path + 1 : "."; }
static int result(int rc) { return rc == -1 ? -errno : 0; }

/* New entries belong to the caller, not to the user who runs this server. */
static int give(const char *path)
{
    struct fuse_context *c = fuse_get_context();

    if (c->uid == geteuid() && c->gid == getegid())
        return 0;
    return result(fchownat(base, rel(path), c->uid, c->gid, AT_SYMLINK_NOFOLLOW));
}

static int fs_getattr(const char *path, struct stat *s, struct fuse_file_info *fi)
{
    metadata_cost(LOOKUPS);
    return result(fi ? fstat(HANDLE(fi)->fd, s) : fstatat(base, rel(path), s, AT_SYMLINK_NOFOLLOW));
}

static int opened(int fd, struct fuse_file_info *fi)
{
    struct handle *h;

    if (fd < 0)
        return -errno;
    h = calloc(1, sizeof *h);
    if (!h) {
        close(fd);
        return -ENOMEM;
    }
    h->fd = fd;
    fi->fh = (uintptr_t)h;
    fi->keep_cache = conf.keep;
    return 0;
}

static int fs_open(const char *path, struct fuse_file_info *fi)
{
    metadata_cost(OPENS);
    return opened(openat(base, rel(path), (fi->flags & ~O_NOFOLLOW & ~O_DIRECT) | O_CLOEXEC), fi);
}

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *fi)
{
    int rc;

    metadata_cost(OPENS);
    rc = opened(openat(base, rel(path), (fi->flags & ~O_DIRECT) | O_CREAT | O_CLOEXEC, mode), fi);
    return rc ? rc : give(path);
}

static int fs_release(const char *path, struct fuse_file_info *fi)
{
    (void)path;
    close(HANDLE(fi)->fd);
    free(HANDLE(fi));
    return 0;
}

static int fs_fsync(const char *path, int datasync, struct fuse_file_info *fi)
{
    (void)path;
    metadata_cost(OTHERS);
    return result(datasync ? fdatasync(HANDLE(fi)->fd) : fsync(HANDLE(fi)->fd));
}

/* Only what exists costs: a request beyond the end of the file moves nothing. */
static long available(int fd, off_t offset, size_t size)
{
    struct stat s;

    if (fstat(fd, &s) || s.st_size - offset >= (off_t)size)
        return (long)size;
    return s.st_size > offset ? s.st_size - offset : 0;
}

static int fs_read_buf(const char *path, struct fuse_bufvec **out, size_t size, off_t offset, struct fuse_file_info *fi)
{
    struct fuse_bufvec *buf = malloc(sizeof *buf);
    long bytes = available(HANDLE(fi)->fd, offset, size);

    (void)path;
    if (!buf)
        return -ENOMEM;
    count(READS, 1);
    count(READ_BYTES, bytes);
    data_cost(bytes);
    *buf = FUSE_BUFVEC_INIT(size);
    buf->buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
    buf->buf[0].fd = HANDLE(fi)->fd;
    buf->buf[0].pos = offset;
    *out = buf;
    return 0;
}

static int fs_write_buf(const char *path, struct fuse_bufvec *in, off_t offset, struct fuse_file_info *fi)
{
    struct fuse_bufvec out = FUSE_BUFVEC_INIT(fuse_buf_size(in));

    (void)path;
    count(WRITES, 1);
    count(WRITE_BYTES, (long)fuse_buf_size(in));
    data_cost((long)fuse_buf_size(in));
    out.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
    out.buf[0].fd = HANDLE(fi)->fd;
    out.buf[0].pos = offset;
    return (int)fuse_buf_copy(&out, in, FUSE_BUF_SPLICE_NONBLOCK);
}

static int fs_opendir(const char *path, struct fuse_file_info *fi)
{
    int rc;

    metadata_cost(LISTINGS);
    rc = opened(openat(base, rel(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC), fi);
    if (rc)
        return rc;
    HANDLE(fi)->dir = fdopendir(HANDLE(fi)->fd);
    if (HANDLE(fi)->dir)
        return 0;
    fs_release(NULL, fi);
    return -ENOMEM;
}

static int fs_readdir(const char *path, void *buf, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *fi,
                      enum fuse_readdir_flags flags)
{
    struct dirent *entry;
    struct stat kind = {0}; /* listings tell types, as those of Lustre and GPFS do */

    (void)path, (void)offset, (void)flags;
    rewinddir(HANDLE(fi)->dir);
    while ((entry = readdir(HANDLE(fi)->dir))) {
        kind.st_mode = DTTOIF(entry->d_type);
        kind.st_ino = entry->d_ino;
        if (fill(buf, entry->d_name, &kind, 0, 0))
            return -ENOMEM;
    }
    return 0;
}

static int fs_releasedir(const char *path, struct fuse_file_info *fi)
{
    (void)path;
    closedir(HANDLE(fi)->dir);
    free(HANDLE(fi));
    return 0;
}

static int fs_readlink(const char *path, char *buf, size_t size)
{
    ssize_t n;

    metadata_cost(OTHERS);
    n = readlinkat(base, rel(path), buf, size - 1);
    if (n < 0)
        return -errno;
    buf[n] = 0;
    return 0;
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *fi)
{
    int fd, rc;

    metadata_cost(OTHERS);
    if (fi)
        return result(ftruncate(HANDLE(fi)->fd, size));
    fd = openat(base, rel(path), O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    rc = result(ftruncate(fd, size));
    close(fd);
    return rc;
}

static int fs_mkdir(const char *path, mode_t mode)
{
    int rc;

    metadata_cost(OTHERS);
    rc = result(mkdirat(base, rel(path), mode));
    return rc ? rc : give(path);
}

static int fs_symlink(const char *target, const char *path)
{
    int rc;

    metadata_cost(OTHERS);
    rc = result(symlinkat(target, base, rel(path)));
    return rc ? rc : give(path);
}

static int fs_mknod(const char *path, mode_t mode, dev_t dev)
{
    int rc;

    metadata_cost(OTHERS);
    rc = result(mknodat(base, rel(path), mode, dev));
    return rc ? rc : give(path);
}

static int fs_unlink(const char *path)
{
    metadata_cost(OTHERS);
    return result(unlinkat(base, rel(path), 0));
}

static int fs_rmdir(const char *path)
{
    metadata_cost(OTHERS);
    return result(unlinkat(base, rel(path), AT_REMOVEDIR));
}

static int fs_statfs(const char *path, struct statvfs *s)
{
    (void)path;
    metadata_cost(OTHERS);
    return result(fstatvfs(base, s));
}

static int fs_rename(const char *from, const char *to, unsigned flags)
{
    metadata_cost(OTHERS);
    return result(renameat2(base, rel(from), base, rel(to), flags));
}

static int fs_link(const char *from, const char *to)
{
    metadata_cost(OTHERS);
    return result(linkat(base, rel(from), base, rel(to), 0));
}

static int fs_chmod(const char *path, mode_t mode, struct fuse_file_info *fi)
{
    metadata_cost(OTHERS);
    return result(fi ? fchmod(HANDLE(fi)->fd, mode) : fchmodat(base, rel(path), mode, 0));
}

static int fs_chown(const char *path, uid_t uid, gid_t gid, struct fuse_file_info *fi)
{
    metadata_cost(OTHERS);
    return result(fi ? fchown(HANDLE(fi)->fd, uid, gid) : fchownat(base, rel(path), uid, gid, AT_SYMLINK_NOFOLLOW));
}

static int fs_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *fi)
{
    metadata_cost(OTHERS);
    return result(fi ? futimens(HANDLE(fi)->fd, times) : utimensat(base, rel(path), times, AT_SYMLINK_NOFOLLOW));
}

static void *fs_init(struct fuse_conn_info *conn, struct fuse_config *cfg)
{
    cfg->use_ino = 1;
    cfg->nullpath_ok = 1;
    cfg->hard_remove = 1;
    conn->max_background = 256;
    conn->congestion_threshold = 192;
    conn->max_readahead = 4 << 20;
    conn->want |= conn->capable & (FUSE_CAP_SPLICE_READ | FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE |
                                   FUSE_CAP_ASYNC_READ | FUSE_CAP_PARALLEL_DIROPS);
    atomic_store(&self->ready, getpid());
    return NULL;
}

static const struct fuse_operations operations = {
    .init = fs_init, .getattr = fs_getattr, .open = fs_open, .create = fs_create, .release = fs_release,
    .fsync = fs_fsync, .read_buf = fs_read_buf, .write_buf = fs_write_buf, .opendir = fs_opendir,
    .readdir = fs_readdir, .releasedir = fs_releasedir, .mkdir = fs_mkdir, .mknod = fs_mknod, .unlink = fs_unlink,
    .rmdir = fs_rmdir, .rename = fs_rename, .symlink = fs_symlink, .link = fs_link, .readlink = fs_readlink,
    .chmod = fs_chmod, .chown = fs_chown, .truncate = fs_truncate, .utimens = fs_utimens, .statfs = fs_statfs,
};

/* ---- the guard: a child that ends the mount when the starter or the server dies, however they die ---- */

static int pidfd(pid_t pid) { return (int)syscall(SYS_pidfd_open, pid, 0); }

static int has_ended(int fd, int timeout_ms)
{
    struct pollfd p = {fd, POLLIN, 0};

    return poll(&p, 1, timeout_ms) > 0;
}

/* Whether `name`, which no other mount has, is mounted; never touches the mount itself. */
static int is_mounted(const char *name)
{
    static char line[8192];
    FILE *f = fopen("/proc/self/mountinfo", "re");
    int found = 0;

    while (f && !found && fgets(line, sizeof line, f))
        found = strstr(line, name) != NULL;
    if (f)
        fclose(f);
    return found;
}

static void unmount(const char *mountpoint)
{
    if (!umount2(mountpoint, MNT_DETACH | UMOUNT_NOFOLLOW))
        return;
    execlp("fusermount3", "fusermount3", "-u", "-z", "-q", mountpoint, (char *)NULL);
}

static void guard(pid_t starter, pid_t server, const char *name, const char *mountpoint)
{
    struct pollfd watched[2] = {{pidfd(starter), POLLIN, 0}, {pidfd(server), POLLIN, 0}};

    /* Without a descriptor a process has ended already. */
    while (watched[0].fd >= 0 && watched[1].fd >= 0 && poll(watched, 2, -1) < 0 && errno == EINTR)
        ;
    if (watched[1].fd >= 0 && !(watched[1].revents & POLLIN)) {
        kill(server, SIGTERM);
        if (!has_ended(watched[1].fd, STOP_MS))
            kill(server, SIGKILL);
        has_ended(watched[1].fd, STOP_MS);
    }
    if (is_mounted(name))
        unmount(mountpoint);
}

static int start_guard(const char *name, const char *mountpoint)
{
    pid_t starter = getppid(), server = getpid(), child;
    int probe = pidfd(starter), null;

    if (probe < 0) /* a kernel before 5.3: at least the server ends with its starter */
        return prctl(PR_SET_PDEATHSIG, SIGTERM);
    close(probe);
    child = fork();
    if (child)
        return child < 0 ? -1 : 0;
    setsid();
    null = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; fd++)
        dup2(null, fd);
    for (int fd = 3; fd < 256; fd++)
        close(fd);
    guard(starter, server, name, mountpoint);
    _exit(0);
}

/* ---- start ---- */

static int map_state(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    long limit = now_ns() + STALE_NS;

    if (fd < 0 || ftruncate(fd, sizeof *state))
        return -1;
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (state == MAP_FAILED)
        return -1;
    self = &state->nodes[conf.node];
    if (atomic_load(&self->clock) > limit)
        atomic_store(&self->clock, 0);
    if (!atomic_load(&self->weight))
        atomic_store(&self->weight, WEIGHT_ONE);
    return 0;
}

#define OPTION(name, format) {#name "=" format, offsetof(__typeof__(conf), name), 0}
static const struct fuse_opt options[] = {OPTION(node, "%d"), OPTION(keep, "%d"), FUSE_OPT_END};

static int failed(const char *what)
{
    perror(what);
    return 1;
}

static int serve(struct fuse_args *args)
{
    fuse_opt_add_arg(args, "-f");
    fuse_opt_add_arg(args, "-oclone_fd");
#if FUSE_MAJOR_VERSION > 3 || FUSE_MINOR_VERSION >= 12
    fuse_opt_add_arg(args, "-omax_threads=256");
#endif
    umask(0);
    prctl(PR_SET_TIMERSLACK, 1000L); /* inherited by the threads: the default of 50 us would show in the latencies */
    return fuse_main(args->argc, args->argv, &operations, NULL);
}

int main(int argc, char **argv)
{
    struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
    char name[64], option[96];

    if (argc < 4) {
        fprintf(stderr, "usage: slowfs SOURCE MOUNTPOINT STATE [-o node=N,keep=1,...]\n");
        return 2;
    }
    fuse_opt_add_arg(&args, argv[0]);
    for (int i = 4; i < argc; i++)
        fuse_opt_add_arg(&args, argv[i]);
    if (fuse_opt_parse(&args, &conf, options, NULL) || conf.node < 0 || conf.node >= NODES)
        return 2;
    base = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (base < 0)
        return failed(argv[1]);
    if (map_state(argv[3]))
        return failed(argv[3]);
    snprintf(name, sizeof name, "hpcstage-slowfs-%d-%d-", getppid(), getpid());
    snprintf(option, sizeof option, "-ofsname=%s,subtype=slowfs", name);
    fuse_opt_add_arg(&args, option);
    fuse_opt_add_arg(&args, argv[2]);
    if (start_guard(name, argv[2]))
        return failed("guard");
    return serve(&args);
}
