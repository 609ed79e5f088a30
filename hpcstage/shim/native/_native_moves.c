/* Moves open files from the source to their copies: who opened a file before there was a copy, and still reads it when
 * there is one, goes on with the copy, under the same number, at the same offset, with the same flags.
 *
 * This is done only where nothing can tell the difference. stat says the same of both files. The open file is this
 * process's alone: it was not there at a fork, exec did not leave it open for a child, it was sent to nobody; its offset
 * would be two otherwise. All numbers that share it are moved together. The C library does not read it by itself, no
 * call of another thread is under way on any dataset file, and the process has no lock on the file by fcntl or lockf,
 * which the end of any descriptor frees. The source's open file is kept under a high number, so that other locks stay
 * on it, and so that it can come back: a copy that was voided, or may be stale, gives the number back to it before the
 * next read. What is mapped stays where it is.
 *
 * Each fact that forbids a move is noted before it comes true, and whoever notes one waits for the end of a move that
 * may not have seen it. What a program does without the C library is not seen.
 */
#include "_native.h"

#include <errno.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOCKED_FILES 64
#define MOST_KEPT 64
#define READS_WAITS 2000 /* of 50 us, for the end of other threads' reads */
#define FIRST_PAUSE_NS 250000000ull
#define LAST_PAUSE_NS 16000000000ull

extern pid_t _Fork(void) WEAK;

struct opening openings[FDS];
uint32_t moves_voided;
static uint32_t serials, forks, spawns;
static int end; /* no number from here on was opened at the source */
static uint64_t pause_ns = FIRST_PAUSE_NS, not_before_ns;

/* Files with locks of the process; more of them than there is room for are any file. */
static struct {
    uint64_t device, inode;
} locked_files[LOCKED_FILES];
static unsigned locked_begun, locked_done;

/* After something was noted: a move that has not seen it ends before this returns. */
static void settle(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&copies_moving, __ATOMIC_SEQ_CST) & PUTTING)
        copies_wait();
}

static uint32_t spawned(void) {
    return __atomic_load_n(&spawns, __ATOMIC_SEQ_CST) + (uint32_t)__atomic_load_n(&hpcstage_vforked, __ATOMIC_SEQ_CST);
}

/* ---- what is noted of open files ---- */
void moved_opened(int fd, int flags, int is_stream, uint32_t published) {
    if ((unsigned)fd >= FDS)
        return;
    if (is_stream || config.direct || page_state() == STATE_MEASURING) {
        moved_forget(fd);
        return;
    }
    int known = __atomic_load_n(&end, __ATOMIC_RELAXED);
    while (known <= fd && !__atomic_compare_exchange_n(&end, &known, fd + 1, 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        ;
    uint32_t serial = __atomic_add_fetch(&serials, 1, __ATOMIC_RELAXED);
    openings[fd] = (struct opening){
        .serial = serial ? serial : 1, .looked = published, .forks = __atomic_load_n(&forks, __ATOMIC_SEQ_CST),
        .spawns = spawned(), .facts = flags & O_CLOEXEC ? 0 : INHERITED, .next = 1};
}

void moved_forget(int fd) {
    if ((unsigned)fd >= FDS)
        return;
    if (openings[fd].serial || openings[fd].facts)
        openings[fd].serial = openings[fd].facts = 0;
    if (openings[fd].rows_seen || openings[fd].arriving || openings[fd].counting)
        openings[fd].rows_seen = openings[fd].arriving = openings[fd].counting = 0;
    if (openings[fd].run || openings[fd].awaited)
        openings[fd].run = openings[fd].run_to = openings[fd].awaited = 0;
    if (openings[fd].next || openings[fd].is_astray)
        openings[fd].next = openings[fd].is_astray = 0;
}

void moved_duplicated(int from, int to, int is_inherited) {
    if ((unsigned)from >= FDS || (unsigned)to >= FDS || (fd_kind(from) != FD_SOURCE && fd_kind(from) != FD_LOCAL))
        return;
    int known = __atomic_load_n(&end, __ATOMIC_RELAXED);
    while (known <= to && !__atomic_compare_exchange_n(&end, &known, to + 1, 1, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
        ;
    openings[from].next = 0;
    openings[from].is_astray = 1;
    openings[to] = openings[from];
    openings[to].facts &= ~(uint32_t)STREAM;
    if (is_inherited)
        moved_inherited(to);
}

static void note_all(int fd, uint32_t fact) {
    uint32_t serial = fd_kind(fd) == FD_SOURCE ? openings[fd].serial : 0;
    if (!serial)
        return;
    for (int other = 0, last = __atomic_load_n(&end, __ATOMIC_SEQ_CST); other < last; other++)
        if (openings[other].serial == serial) {
            openings[other].facts |= fact;
            if (!fact)
                openings[other].serial = 0;
        }
    settle();
}

void moved_inherited(int fd) {
    note_all(fd, INHERITED);
}

void moved_shared(int fd) {
    note_all(fd, 0);
}

void moved_forks(void) {
    __atomic_add_fetch(&forks, 1, __ATOMIC_SEQ_CST);
    settle();
}

static void spawns_child(void) {
    __atomic_add_fetch(&spawns, 1, __ATOMIC_SEQ_CST);
    settle();
}

/* Returns whether a lock is noted for this file. */
static int is_locked(const struct stat *info) {
    unsigned done = __atomic_load_n(&locked_done, __ATOMIC_SEQ_CST);
    if (done != __atomic_load_n(&locked_begun, __ATOMIC_SEQ_CST) || done > LOCKED_FILES)
        return 1;
    for (unsigned i = 0; i < done; i++)
        if (locked_files[i].device == info->st_dev && locked_files[i].inode == info->st_ino)
            return 1;
    return 0;
}

int moved_is_locked(int fd) {
    struct stat info;
    int saved = errno, found = fstat(fd, &info) == 0 && is_locked(&info);
    errno = saved;
    return found;
}

void moved_locks(int fd) {
    struct stat info;
    int saved = errno;
    if (fstat(fd, &info) == 0 && !is_locked(&info)) {
        unsigned at = __atomic_fetch_add(&locked_begun, 1, __ATOMIC_SEQ_CST);
        if (at < LOCKED_FILES) {
            locked_files[at].device = info.st_dev;
            locked_files[at].inode = info.st_ino;
        }
        __atomic_add_fetch(&locked_done, 1, __ATOMIC_SEQ_CST);
        settle();
    }
    errno = saved;
}

/* ---- a move ---- */
/* As far as is noted. */
static int moved_would(int fd) {
    const struct opening *o = &openings[fd];
    return o->serial && !(o->facts & STREAM) && o->forks == __atomic_load_n(&forks, __ATOMIC_SEQ_CST) &&
           (!(o->facts & INHERITED) || o->spawns == spawned());
}

static int may_move(int fd) {
    int flags = moved_would(fd) ? fcntl(fd, F_GETFD) : -1;
    return flags >= 0 && ((flags & FD_CLOEXEC) || openings[fd].spawns == spawned());
}

static int all_may_move(int fd) {
    for (int other = next_sharing(FD_SOURCE, fd, 0); other >= 0; other = next_sharing(FD_SOURCE, fd, other + 1))
        if (!may_move(other) || openings[other].serial != openings[fd].serial)
            return 0;
    return may_move(fd);
}

static int is_room(void) {
    int kept = 0;
    for (const unsigned char *from = fd_kinds, *last = fd_kinds + FDS, *found;
         from < last && (found = memchr(from, FD_LOCK, (size_t)(last - from))); from = found + 1)
        kept++;
    return kept < MOST_KEPT;
}

static void place(int copy, int fd, int kept) {
    int flags = fcntl(fd, F_GETFD);
    if (dup3(copy, fd, flags >= 0 && (flags & FD_CLOEXEC) ? O_CLOEXEC : 0) < 0)
        return;
    openings[fd].facts |= MOVED;
    copy_locks[fd] = kept + 1;
    __atomic_store_n(&fd_kinds[fd], FD_LOCAL, __ATOMIC_SEQ_CST);
}

/* Puts the copy in the place of `fd` and of all numbers that share it, and keeps the source. */
static int put(int fd, int copy) {
    off_t at = lseek(fd, 0, SEEK_CUR);
    int flags = fcntl(fd, F_GETFD);
    if (at < 0 || flags < 0 || lseek(copy, at, SEEK_SET) != at)
        return 0;
    int kept = fcntl(fd, flags & FD_CLOEXEC ? F_DUPFD_CLOEXEC : F_DUPFD, copy_keeps_at());
    if (kept >= FDS)
        close(kept);
    if (kept < 0 || kept >= FDS)
        return 0;
    copies_locked = 1;
    fd_mark(kept, FD_LOCK);
    for (int other = next_sharing(FD_SOURCE, fd, 0); other >= 0; other = next_sharing(FD_SOURCE, fd, other + 1))
        if (other != fd)
            place(copy, other, kept);
    place(copy, fd, kept);
    if (next_sharing(FD_SOURCE, kept, 0) < 0)
        lseek(kept, MOVED_OFFSET, SEEK_SET);
    return fd_kind(fd) == FD_LOCAL;
}

static void defer_copies(void) {
    __atomic_store_n(&not_before_ns, now_ns() + pause_ns, __ATOMIC_RELAXED);
    if (pause_ns < LAST_PAUSE_NS)
        pause_ns *= 2;
}

static int put_at_rest(int fd, int copy, const struct stat *info, uint32_t serial, uint32_t voided) {
    struct putting putting;
    int rests = putting_begin(&putting, READS_WAITS);
    int done = rests && fd_kind(fd) == FD_SOURCE && openings[fd].serial == serial && page_serves() &&
               voided == __atomic_load_n(page_voided, __ATOMIC_SEQ_CST) && all_may_move(fd) && !is_locked(info) &&
               is_room() && put(fd, copy);
    putting_end(&putting);
    if (!rests) {
        defer_copies();
        openings[fd].looked--;
    }
    return done;
}

static int is_gone(int fd) {
    struct stat info;
    PLACE(at);
    return fstat(fd, &info) != 0 || info.st_nlink == 0 || locate_copy(fd, at) != FILE_NAME;
}

static void move(int fd, const struct place *at) {
    uint32_t serial = openings[fd].serial, voided = __atomic_load_n(page_voided, __ATOMIC_SEQ_CST);
    struct stat info;
    int flags = fcntl(fd, F_GETFL), done = 0;
    if (flags < 0 || (flags & (O_ACCMODE | O_APPEND | O_DIRECT | O_PATH | O_ASYNC)) || !may_move(fd))
        return;
    int copy = open(at->local, flags | O_CLOEXEC);
    if (copy < 0)
        return;
    int cancels = turn_take();
    if (fstat(fd, &info) == 0 && attributes_equal(copy, &info))
        done = put_at_rest(fd, copy, &info, serial, voided);
    close(copy);
    turn_give(cancels);
    if (done)
        count(COUNTER_MOVED_OPENS, 1);
    if (done && voided != __atomic_load_n(page_voided, __ATOMIC_SEQ_CST) && is_gone(fd))
        copy_returns(fd); /* who looked for void copies meanwhile may have come too early */
}

static void look_for_copy(int fd) {
    struct opening *o = &openings[fd];
    PLACE(at);
    uint32_t published = __atomic_load_n(page_published, __ATOMIC_ACQUIRE);
    uint64_t not_before = __atomic_load_n(&not_before_ns, __ATOMIC_RELAXED);
    if (o->serial && (!page_serves() || (not_before && now_ns() < not_before)))
        return;
    __atomic_store_n(&o->looked, published, __ATOMIC_RELAXED);
    if (moved_would(fd) && locate_fd(fd, at) == FILE_NAME && !at->map->quiet)
        move(fd, at);
}

static void look_for_voids(int fd) {
    uint32_t voided = __atomic_load_n(page_voided, __ATOMIC_SEQ_CST);
    if (voided != moves_voided) {
        for (const unsigned char *from = fd_kinds, *last = fd_kinds + FDS, *found;
             from < last && (found = memchr(from, FD_LOCAL, (size_t)(last - from))); from = found + 1) {
            int other = (int)(found - fd_kinds);
            if ((openings[other].facts & MOVED) && is_gone(other))
                copy_returns(other);
        }
        __atomic_store_n(&moves_voided, voided, __ATOMIC_SEQ_CST);
    }
    if (moved_is(fd, fd_kind(fd)) && !page_serves())
        copy_returns(fd);
}

/* A child between vfork and exec has the memory of its parent, but descriptors of its own. */
__attribute__((noinline)) int moved_look(int fd) {
    int saved = errno, kind = fd_kind(fd);
    if (!hpcstage_vforked || slot_is_mine()) {
        if (kind == FD_SOURCE)
            look_for_copy(fd);
        else if (kind == FD_LOCAL)
            look_for_voids(fd);
    }
    errno = saved;
    return fd_kind(fd);
}

/* ---- hooks ---- */
#define HOOK_LSEEK(name, type) \
    static type at_rest_##name(int fd, type offset, int whence) HELD(fd, type, name(fd, offset, whence)) \
    static type hook_##name(int fd, type offset, int whence) { \
        moved_kind(fd, fd_kind(fd)); \
        type result = at_rest_##name(fd, offset, whence); \
        if (fd_kind(fd) == FD_SOURCE) \
            arrivals_seeked(fd, result); \
        return result; \
    }
HOOK_LSEEK(lseek, off_t)
HOOK_LSEEK(lseek64, off64_t)

static ssize_t hook_splice(int fd, off64_t *at, int to, off64_t *to_at, size_t n, unsigned flags)
    HELD(fd, ssize_t, splice(fd, at, to, to_at, n, flags))

static FILE *hook_fdopen(int fd, const char *mode) {
    if (fd_kind(fd) == FD_SOURCE) {
        openings[fd].facts |= STREAM;
        settle();
    }
    return fdopen(fd, mode);
}

static int hook_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                            const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) {
    spawns_child();
    return posix_spawn(pid, path, actions, attributes, argv, envp);
}

static int hook_posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
                             const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]) {
    spawns_child();
    return posix_spawnp(pid, file, actions, attributes, argv, envp);
}

static int hook_posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t *actions, int fd, int to) {
    moved_shared(fd);
    return posix_spawn_file_actions_adddup2(actions, fd, to);
}

static int hook_system(const char *command) {
    spawns_child();
    return system(command);
}

static FILE *hook_popen(const char *command, const char *type) {
    spawns_child();
    return popen(command, type);
}

static pid_t hook__Fork(void) {
    moved_forks();
    return _Fork();
}

/* Descriptors that are sent to another process. */
static void sent(const struct msghdr *message) {
    for (struct cmsghdr *part = CMSG_FIRSTHDR(message); part; part = CMSG_NXTHDR((struct msghdr *)message, part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS || part->cmsg_len < CMSG_LEN(0))
            continue;
        for (size_t at = 0; at + sizeof(int) <= part->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
            int fd;
            memcpy(&fd, CMSG_DATA(part) + at, sizeof fd);
            moved_shared(fd);
        }
    }
}

static ssize_t hook_sendmsg(int to, const struct msghdr *message, int flags) {
    if (message && message->msg_controllen)
        sent(message);
    return sendmsg(to, message, flags);
}

static int hook_sendmmsg(int to, struct mmsghdr *messages, unsigned n, int flags) {
    for (unsigned i = 0; messages && i < n; i++)
        if (messages[i].msg_hdr.msg_controllen)
            sent(&messages[i].msg_hdr);
    return sendmmsg(to, messages, n, flags);
}

#define ENTRY(name) {#name, (void *)hook_##name},
const struct hook hooks_moves[] = {
    ENTRY(lseek) ENTRY(lseek64) ENTRY(splice) ENTRY(fdopen) ENTRY(posix_spawn) ENTRY(posix_spawnp)
    ENTRY(posix_spawn_file_actions_adddup2) ENTRY(system) ENTRY(popen) ENTRY(_Fork) ENTRY(sendmsg)
    ENTRY(sendmmsg) {NULL, NULL}};
