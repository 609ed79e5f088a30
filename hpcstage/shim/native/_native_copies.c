/* Handles descriptors of copies that are used for more than reading: locks, attributes, other names of the descriptor.
 *
 * A call that changes the file or asks for more than bytes puts the source's descriptor in the copy's place, with the
 * same offset and flags, for every number that shares it. A lock is taken on a second descriptor, of the source;
 * reading goes on from the copy, which is exact as long as the source is as it was when the lock was got. Where the
 * source has gone or is another file by now, the copy is what is left of the file that was opened, and the call acts on
 * it.
 *
 * Another thread may close a number at any time, and the next open of any thread gets it. Whoever closes a number takes
 * its mark away first, and waits for the end of what is being put in places; whoever puts something in a number's place
 * says so first, and then looks at the mark and at the file. So one of both always sees the other.
 */
#include "_native.h"

#include <errno.h>
#include <linux/fs.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define NONE_FREE INT_MIN
#define HIGH_NUMBER 512 /* locks' descriptors leave the low numbers to the program */
#define TURN_WAITS 400 /* of 50 us */
#define HELD_WAITS 20
#define C_LIBRARY_S_SIGNALS (3ull << 31) /* 32 and 33 */
#define MOVE_WAITS 20000 /* of 50 us: longer than anything is put in places */

int copy_locks[FDS];
int copies_locked;     /* whether there has been any */
unsigned copies_moving;
static unsigned moves;
static int turn; /* one thread at a time opens sources for copies that are open, as far as that can be waited for */

static void pause_50us(void) {
    static const struct timespec pause = {0, 50000};
    nanosleep(&pause, NULL);
}

/* Returns whether the thread can be cancelled, which it cannot be in its turn: it would never end it. */
int turn_take(void) {
    int cancels;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancels);
    for (int i = 0; i < TURN_WAITS && __atomic_exchange_n(&turn, 1, __ATOMIC_ACQUIRE); i++)
        pause_50us();
    return cancels;
}

void turn_give(int cancels) {
    __atomic_store_n(&turn, 0, __ATOMIC_RELEASE);
    pthread_setcancelstate(cancels, &cancels);
}

/* Waits for the end of the move that is going on. One that never ends holds up the others once. */
void copies_wait(void) {
    int saved = errno;
    unsigned begun = __atomic_load_n(&copies_moving, __ATOMIC_SEQ_CST), now = begun;
    for (int i = 0; i < MOVE_WAITS && now && now / 2 == begun / 2; i++) {
        pause_50us();
        now = __atomic_load_n(&copies_moving, __ATOMIC_SEQ_CST);
    }
    if (now && now / 2 == begun / 2)
        __atomic_compare_exchange_n(&copies_moving, &now, STILL, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    errno = saved;
}

/* The kernel's set of signals, which is a sixteenth of the C library's. Returns what it was. */
static uint64_t mask_signals(int how, uint64_t set) {
    uint64_t before = 0;
    syscall(SYS_rt_sigprocmask, how, &set, &before, sizeof set);
    return before;
}

/* Returns the signals that the thread keeps from itself until the end: a handler would wait for its own thread, or close
 * what is being put in its place. */
static uint64_t begin_moving(unsigned how) {
    uint64_t kept = mask_signals(SIG_BLOCK, ~C_LIBRARY_S_SIGNALS);
    unsigned still = STILL, move = 2 * (__atomic_add_fetch(&moves, 1, __ATOMIC_RELAXED) % (UINT_MAX / 2) + 1) + how;
    while (!__atomic_compare_exchange_n(&copies_moving, &still, move, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        copies_wait();
        still = STILL;
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return kept;
}

/* Other threads' calls end before and begin after, as far as that can be waited for. Those that only hold their file may
 * last for long, and are given little time. */
int putting_begin(struct putting *putting, int waits) {
    putting->signals = begin_moving(0);
    for (int i = 0; i < waits && (!waits_none() || (i < HELD_WAITS && holds_any())); i++)
        pause_50us();
    __atomic_or_fetch(&copies_moving, PUTTING, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return waits_none() && !holds_any();
}

void putting_end(const struct putting *putting) {
    __atomic_store_n(&copies_moving, STILL, __ATOMIC_SEQ_CST);
    mask_signals(SIG_SETMASK, putting->signals);
}

int copy_let_go(int fd) {
    int kind = fd_kind(fd);
    fd_mark(fd, FD_OTHER);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (kind != FD_OTHER && __atomic_load_n(&copies_moving, __ATOMIC_SEQ_CST) & PUTTING) {
        copies_wait();
        if (fd_kind(fd) != FD_OTHER) /* the source came in its place */
            kind = fd_kind(fd);
        fd_mark(fd, FD_OTHER);
    }
    return kind;
}

void copies_forked(void) {
    turn = copies_moving = 0;
}

/* ---- the source of a copy ---- */
static int unchanged(int fd, int source) {
    struct stat copy, now;
    return fstat(fd, &copy) == 0 && fstat(source, &now) == 0 && S_ISREG(now.st_mode) && copy.st_size == now.st_size &&
           copy.st_mtim.tv_sec == now.st_mtim.tv_sec && copy.st_mtim.tv_nsec == now.st_mtim.tv_nsec;
}

/* Finds where a copy that is open is, or was before it was dropped. */
static enum kind place_of(int fd, struct place *at) {
    static const char deleted[] = " (deleted)";
    struct stat info;
    enum kind kind = locate_copy(fd, at);
    size_t n = kind == FILE_NAME ? strlen(at->local) : 0;
    if (n > sizeof deleted && strcmp(at->local + n - (sizeof deleted - 1), deleted) == 0 &&
        fstatat(AT_FDCWD, at->local, &info, AT_SYMLINK_NOFOLLOW) != 0)
        at->local[n - (sizeof deleted - 1)] = 0;
    return kind;
}

int copy_source(int fd, char *out) {
    PLACE(at);
    if (place_of(fd, at) != FILE_NAME)
        return 0;
    source_of(at, out);
    return out[0] != 0;
}

/* Closes a number of the source. It stays where the process has a lock on the file, which closing any number would free. */
static void close_source(int fd) {
    if ((unsigned)fd >= FDS || !moved_is_locked(fd)) {
        close(fd);
        return;
    }
    copies_locked = 1;
    fd_mark(fd, FD_LOCK);
}

/* Returns a descriptor of the file that was copied, opened as the copy is; NONE_FREE: it could not be opened; -1: it has
 * gone, or is another file. */
static int open_source(int fd, const struct place *at) {
    ROOM(char, source);
    if (!source)
        return NONE_FREE;
    int flags = fcntl(fd, F_GETFL);
    source_of(at, source);
    if (flags < 0 || !source[0])
        return -1;
    int opened = open(source, (flags & ~(O_CREAT | O_EXCL | O_TRUNC | O_APPEND)) | O_CLOEXEC);
    if (opened < 0)
        return errno == EMFILE || errno == ENFILE || errno == ENOMEM ? NONE_FREE : -1;
    if (attributes_same(fd, opened))
        return opened;
    close_source(opened);
    return -1;
}

/* Whether two numbers stand for one open file, with one offset: then a flag that means nothing for files is shared. */
static int shares(int fd, int other) {
    if (fd == other)
        return 1;
    int before = fcntl(other, F_GETFL), flags = fcntl(fd, F_GETFL);
    if (before < 0 || flags < 0 || fcntl(fd, F_SETFL, flags ^ O_NONBLOCK) != 0)
        return 0;
    int after = fcntl(other, F_GETFL);
    fcntl(fd, F_SETFL, flags);
    return after >= 0 && ((after ^ before) & O_NONBLOCK);
}

int next_sharing(int kind, int fd, int from) {
    while (from < FDS) {
        const unsigned char *found = memchr(fd_kinds + from, kind, FDS - (size_t)from);
        if (!found)
            break;
        from = (int)(found - fd_kinds);
        if (shares(fd, from))
            return from;
        from++;
    }
    return -1;
}

static void put_in_place(int source, int fd) {
    int flags = fcntl(fd, F_GETFD);
    if (dup3(source, fd, flags >= 0 && (flags & FD_CLOEXEC) ? O_CLOEXEC : 0) >= 0) {
        fd_mark(fd, FD_SOURCE);
        moved_forget(fd);
    }
}

/* Whether a number is still that of the copy at `at` (NULL: wherever it is now), of which `info` was said. */
static int is_still(int fd, const struct place *at, const struct stat *info) {
    PLACE(now_at);
    struct stat now;
    return fd_kind(fd) == FD_LOCAL && fstat(fd, &now) == 0 && now.st_dev == info->st_dev && now.st_ino == info->st_ino &&
           now.st_size == info->st_size && now.st_mtim.tv_sec == info->st_mtim.tv_sec &&
           now.st_mtim.tv_nsec == info->st_mtim.tv_nsec &&
           (!at || (place_of(fd, now_at) == FILE_NAME && strcmp(now_at->local, at->local) == 0));
}

/* Puts the source in the place of `fd` and of all numbers that share it: the descriptor on which the copy's locks are,
 * or else `opened`. Returns whether the source is there now. */
static int replace(int fd, const struct place *at, const struct stat *info, int opened) {
    struct putting putting;
    putting_begin(&putting, TURN_WAITS);
    int source = copy_locks[fd] ? copy_locks[fd] - 1 : opened;
    if (source >= 0 && is_still(fd, at, info)) {
        if (!moved_is(fd, FD_LOCAL) || lseek(source, 0, SEEK_CUR) == MOVED_OFFSET) /* else a forked process was first */
            lseek(source, lseek(fd, 0, SEEK_CUR), SEEK_SET);
        for (int other = next_sharing(FD_LOCAL, fd, 0); other >= 0; other = next_sharing(FD_LOCAL, fd, other + 1))
            if (other != fd)
                put_in_place(source, other);
        put_in_place(source, fd);
    }
    int done = fd_kind(fd) == FD_SOURCE;
    putting_end(&putting);
    return done;
}

/* The source that was kept is put back also where no name leads to it any more. */
int copy_returns(int fd) {
    struct stat info;
    int saved = errno, done = 0, cancels = turn_take();
    if (fd_kind(fd) == FD_LOCAL && copy_locks[fd] && fstat(fd, &info) == 0)
        done = replace(fd, NULL, &info, -1);
    turn_give(cancels);
    errno = saved;
    return done || copy_surrender(fd);
}

/* Puts the source in the copy's place. Returns 1 if it is there, and `at` is where the copy is; 0 if `fd` is no copy, or
 * all that is left of the file. */
static __attribute__((noinline)) int surrender(int fd, struct place *at) {
    int saved = errno, done = 0;
    struct stat info;
    int cancels = turn_take();
    if (fd_kind(fd) == FD_LOCAL && fstat(fd, &info) == 0 && place_of(fd, at) == FILE_NAME) {
        int opened = copy_locks[fd] ? -1 : open_source(fd, at);
        if (opened >= 0 || copy_locks[fd])
            done = replace(fd, at, &info, opened);
        if (opened >= 0)
            close_source(opened);
    }
    turn_give(cancels);
    errno = saved;
    return done;
}

int copy_surrender(int fd) {
    if (fd_kind(fd) != FD_LOCAL)
        return 0;
    PLACE(at);
    return surrender(fd, at);
}

/* A descriptor of the source may have been opened before there was a copy. */
static __attribute__((noinline)) void surrender_and_drop(int fd) {
    PLACE(at);
    int saved = errno;
    if (surrender(fd, at) || (fd_kind(fd) != FD_LOCAL && locate_fd(fd, at) == FILE_NAME))
        drop(at);
    errno = saved;
}

void copy_changes(int fd) {
    if (fd_kind(fd) == FD_LOCAL || fd_kind(fd) == FD_SOURCE || fd >= FDS)
        surrender_and_drop(fd);
}

void copies_change(const struct place *at) {
    PLACE(open_at);
    int saved = errno;
    for (const unsigned char *from = fd_kinds, *end = fd_kinds + FDS, *found;
         from < end && (found = memchr(from, FD_LOCAL, (size_t)(end - from))); from = found + 1) {
        int fd = (int)(found - fd_kinds);
        if (place_of(fd, open_at) == FILE_NAME && strcmp(open_at->local, at->local) == 0)
            copy_surrender(fd);
    }
    errno = saved;
}

/* ---- locks ---- */

/* Chooses where a lock's descriptor goes. Below a small limit, the upper half leaves the program's next opens their
 * numbers. */
int copy_keeps_at(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur > HIGH_NUMBER)
        return HIGH_NUMBER;
    return (int)(limit.rlim_cur / 2);
}

/* Keeps `opened` for the locks of a copy, whatever number it has. Returns 0 if it is not kept. */
static int lock_with(int fd, const struct place *at, const struct stat *info, int opened) {
    struct putting putting = {begin_moving(PUTTING)};
    int kept = opened < FDS && !copy_locks[fd] && is_still(fd, at, info);
    if (kept) {
        copies_locked = 1;
        fd_mark(opened, FD_LOCK);
        for (int other = next_sharing(FD_LOCAL, fd, 0); other >= 0; other = next_sharing(FD_LOCAL, fd, other + 1))
            copy_locks[other] = opened + 1;
    }
    putting_end(&putting);
    return kept;
}

/* Returns the descriptor to lock for a copy, or NONE_FREE. With `lets_go` nothing is to be locked, so nothing is opened for
 * it. */
static __attribute__((noinline)) int lock_of(int fd, int lets_go) {
    PLACE(at);
    struct stat info;
    int saved = errno, cancels = turn_take(), instead = fd;
    if (!copy_locks[fd] && !lets_go && fstat(fd, &info) == 0 && place_of(fd, at) == FILE_NAME) {
        int flags = fcntl(fd, F_GETFD), opened = open_source(fd, at);
        if (opened == NONE_FREE)
            instead = NONE_FREE;
        int may_close = opened >= 0 && !moved_is_locked(opened);
        int high = may_close ? fcntl(opened, flags & FD_CLOEXEC ? F_DUPFD_CLOEXEC : F_DUPFD, copy_keeps_at()) : -1;
        if (high >= 0) {
            close(opened);
            opened = high;
        }
        if (opened >= 0 && !lock_with(fd, at, &info, opened)) {
            if (opened >= FDS)
                instead = NONE_FREE;
            close_source(opened);
        }
    }
    int lock = copy_locks[fd] - 1;
    turn_give(cancels);
    errno = saved;
    return lock >= 0 ? lock : instead;
}

static inline int to_lock(int fd, int lets_go) {
    return fd_kind(fd) == FD_LOCAL ? lock_of(fd, lets_go) : fd;
}

/* A program that has a lock reads what is in the source now. */
static int locked(int fd, int lock, int result) {
    if (lock != fd && result == 0) {
        int saved = errno;
        if (!unchanged(fd, lock))
            copy_surrender(fd);
        errno = saved;
    }
    return result;
}

/* Is called before a number is closed, or after it came to stand for another file. */
void copy_closed(int fd) {
    if (copy_let_go(fd) == FD_LOCK) { /* by a program that closes all numbers */
        for (int i = 0; i < FDS; i++)
            if (copy_locks[i] == fd + 1)
                copy_locks[i] = 0;
        return;
    }
    int lock = (unsigned)fd < FDS ? copy_locks[fd] : 0;
    if (!lock)
        return;
    copy_locks[fd] = 0;
    for (int i = 0; i < FDS; i++)
        if (copy_locks[i] == lock)
            return;
    int saved = errno;
    if (__atomic_exchange_n(&fd_kinds[lock - 1], FD_OTHER, __ATOMIC_SEQ_CST) == FD_LOCK) /* one thread's last, or several' */
        close(lock - 1);
    errno = saved;
}

void copy_duplicated(int fd, int to) {
    if ((unsigned)to < FDS && (unsigned)fd < FDS)
        copy_locks[to] = copy_locks[fd];
}

/* Gives a lock's descriptor the offset of its copy's. Returns the one that it had; -1: it is no other. */
static off_t lend_offset(int fd, int lock) {
    int saved = errno;
    off_t offset = lock != fd ? lseek(lock, 0, SEEK_CUR) : -1;
    if (offset >= 0)
        lseek(lock, lseek(fd, 0, SEEK_CUR), SEEK_SET);
    errno = saved;
    return offset;
}

/* A lock on the source is the open file's, which stays what it is meanwhile. One that is the process's is noted, whichever
 * open file of the source it is got by. */
#define LOCKED(fd, lets_go, is_process_s, from_here, call) \
    int notes = (is_process_s) && !(lets_go); \
    if (notes && fd_kind(fd) != FD_LOCAL) \
        moved_locks(fd); \
    int held = fd_kind(fd) == FD_SOURCE; \
    if (held) \
        hold_begin(); \
    int lock = to_lock(fd, lets_go); \
    if (lock == NONE_FREE) { \
        errno = ENOLCK; \
        return -1; \
    } \
    if (notes && lock != fd) \
        moved_locks(lock); \
    off_t offset = from_here ? lend_offset(fd, lock) : -1; \
    int result = call; \
    if (offset >= 0) \
        lseek(lock, offset, SEEK_SET); \
    if (held) { \
        hold_end(); \
        arrivals_anew(); \
    } \
    return locked(fd, lock, result);

static int hook_flock(int fd, int operation) {
    LOCKED(fd, operation & LOCK_UN, 0, 0, flock(lock, operation))
}

static int hook_lockf(int fd, int command, off_t n) {
    LOCKED(fd, command == F_ULOCK, command != F_TEST, 1, lockf(lock, command, n))
}

static int hook_lockf64(int fd, int command, off64_t n) {
    LOCKED(fd, command == F_ULOCK, command != F_TEST, 1, lockf64(lock, command, n))
}

extern int fcntl64(int, int, ...) WEAK;

static int locks_something(int command) {
    return command == F_GETLK || command == F_SETLK || command == F_SETLKW || command == F_OFD_GETLK ||
           command == F_OFD_SETLK || command == F_OFD_SETLKW;
}

#define HOOK_FCNTL(name) \
    static int set_by_##name(int fd, int command, void *argument) HELD(fd, int, name(fd, command, argument)) \
    static int hook_##name(int fd, int command, ...) { \
        va_list arguments; \
        va_start(arguments, command); \
        void *argument = va_arg(arguments, void *); \
        va_end(arguments); \
        if (locks_something(command) && argument) { \
            const struct flock *asked = argument; \
            LOCKED(fd, asked->l_type == F_UNLCK, command == F_SETLK || command == F_SETLKW, asked->l_whence == SEEK_CUR, \
                   name(lock, command, argument)) \
        } \
        if (command == F_SETLEASE || (command == F_SETFL && ((intptr_t)argument & O_DIRECT))) { \
            moved_shared(fd); \
            copy_surrender(fd); \
        } \
        if (command == F_SETFD && !((intptr_t)argument & FD_CLOEXEC)) \
            moved_inherited(fd); \
        if (command == F_DUPFD || command == F_DUPFD_CLOEXEC) \
            HELD(fd, int, fd_duplicated(fd, name(fd, command, argument), command == F_DUPFD)) \
        int result = command == F_SETFD || command == F_SETFL ? set_by_##name(fd, command, argument) \
                                                              : name(fd, command, argument); \
        if (command == F_SETFL) \
            arrivals_anew(); \
        if (command == F_SETFD && fd_kind(fd) == FD_LOCAL && copy_locks[fd]) \
            name(copy_locks[fd] - 1, command, argument); \
        return result; \
    }
HOOK_FCNTL(fcntl)
HOOK_FCNTL(fcntl64)

/* ---- other names of a descriptor ---- */

/* Whether a name begins as those do that are looked for below: each open asks this. */
static inline int may_name_fd(const char *path) {
    if (path[0] != '/' || path[1] != 'd')
        return path[0] == '/' && path[1] == 'p' && path[2] == 'r' && path[3] == 'o' && path[4] == 'c';
    return path[2] == 'e' && path[3] == 'v' && path[4] == '/' && (path[5] == 'f' || (path[5] == 's' && path[6] == 't'));
}

/* Returns the number in /proc/self/fd/N, /dev/fd/N and their like; -1 for any other name. */
int fd_named(const char *path) {
    static const char *const names[] = {"/proc/self/fd/", "/dev/fd/", "/proc/thread-self/fd/"};
    static const char *const standard[] = {"/dev/stdin", "/dev/stdout", "/dev/stderr"};
    if (!path || !may_name_fd(path))
        return -1;
    for (int fd = 0; fd < 3; fd++)
        if (strcmp(path, standard[fd]) == 0)
            return fd;
    const char *digits = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strncmp(path, names[i], strlen(names[i])) == 0)
            digits = path + strlen(names[i]);
    if (!digits && strncmp(path, "/proc/", 6) == 0) {
        long pid = 0;
        for (digits = path + 6; *digits >= '0' && *digits <= '9'; digits++)
            pid = pid * 10 + (*digits - '0');
        digits = pid == getpid() && strncmp(digits, "/fd/", 4) == 0 ? digits + 4 : NULL;
    }
    int fd = 0;
    if (!digits || !*digits)
        return -1;
    for (; *digits >= '0' && *digits <= '9'; digits++)
        fd = fd < FDS ? fd * 10 + (*digits - '0') : FDS;
    return *digits || fd >= FDS ? -1 : fd;
}

int copy_named(const char *path) {
    int fd = fd_named(path);
    return fd >= 0 && fd_kind(fd) == FD_LOCAL ? fd : -1;
}

/* ---- attributes ---- */
static int hook_fchmod(int fd, mode_t mode) {
    copy_changes(fd);
    return fchmod(fd, mode);
}

static int hook_fchown(int fd, uid_t uid, gid_t gid) {
    copy_changes(fd);
    return fchown(fd, uid, gid);
}

static int hook_futimens(int fd, const struct timespec times[2]) {
    copy_changes(fd);
    return futimens(fd, times);
}

static int hook_futimes(int fd, const struct timeval times[2]) {
    copy_changes(fd);
    return futimes(fd, times);
}

static int hook_fsetxattr(int fd, const char *name, const void *value, size_t n, int flags) {
    copy_changes(fd);
    return fsetxattr(fd, name, value, n, flags);
}

static int hook_fremovexattr(int fd, const char *name) {
    copy_changes(fd);
    return fremovexattr(fd, name);
}

static ssize_t hook_fgetxattr(int fd, const char *name, void *value, size_t n) {
    copy_surrender(fd);
    return fgetxattr(fd, name, value, n);
}

static ssize_t hook_flistxattr(int fd, char *names, size_t n) {
    copy_surrender(fd);
    return flistxattr(fd, names, n);
}

/* ---- what file systems do between their own files, or tell of them ---- */
/* The store's file system is not the source's. */
#define HOOK_FSTATFS(name, by_path, type) \
    static int hook_##name(int fd, struct type *out) { \
        if (fd_kind(fd) != FD_LOCAL) \
            return name(fd, out); \
        ROOM(char, source); \
        int saved = errno; \
        if (source && copy_source(fd, source) && by_path(source, out) == 0) \
            return 0; \
        errno = saved; \
        return name(fd, out); \
    }
HOOK_FSTATFS(fstatfs, statfs, statfs)
HOOK_FSTATFS(fstatfs64, statfs64, statfs64)
HOOK_FSTATFS(fstatvfs, statvfs, statvfs)
HOOK_FSTATFS(fstatvfs64, statvfs64, statvfs64)

static int of_file_systems(unsigned long request) {
    unsigned kind = _IOC_TYPE(request);
    return kind == 'f' || kind == 'X' || kind == 0x94;
}

static int hook_ioctl(int fd, unsigned long request, ...) {
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    if (request == FIONCLEX)
        moved_inherited(fd);
    if (of_file_systems(request)) {
        copy_surrender(fd);
        if (request == FICLONE)
            copy_surrender((int)(intptr_t)argument);
        if (request == FICLONERANGE && argument)
            copy_surrender((int)((const struct file_clone_range *)argument)->src_fd);
    }
    return ioctl(fd, request, argument);
}

#define ENTRY(name) {#name, (void *)hook_##name},
const struct hook hooks_copies[] = {
    ENTRY(flock) ENTRY(lockf) ENTRY(lockf64) ENTRY(fcntl) ENTRY(fcntl64) ENTRY(fchmod) ENTRY(fchown) ENTRY(futimens)
    ENTRY(futimes) ENTRY(fsetxattr) ENTRY(fremovexattr) ENTRY(fgetxattr) ENTRY(flistxattr) ENTRY(ioctl)
    ENTRY(fstatfs) ENTRY(fstatfs64) ENTRY(fstatvfs) ENTRY(fstatvfs64) {NULL, NULL}};
