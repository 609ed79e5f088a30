/* Calls each function that is redirected where there is little stack, and says how much of it a call uses. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#define ROOMY (512 << 10)
#define PAINT 0xa5

extern int __open_2(const char *, int), __open64_2(const char *, int), __openat_2(int, const char *, int),
    __openat64_2(int, const char *, int);
extern ssize_t __read_chk(int, void *, size_t, size_t), __pread_chk(int, void *, size_t, off_t, size_t),
    __pread64_chk(int, void *, size_t, off64_t, size_t);
extern size_t __fread_chk(void *, size_t, size_t, size_t, FILE *);
extern void __longjmp_chk(jmp_buf, int) __attribute__((noreturn));

/* What a case works with: made anew for each call. `hit` has a copy, `miss` has none. */
static char hit[PATH_MAX], miss[PATH_MAX], made[PATH_MAX], alias[PATH_MAX], dots[PATH_MAX], beyond[PATH_MAX],
    outside[PATH_MAX], folder[PATH_MAX];
static int copy, source, at, sockets[2];
static FILE *stream;
static DIR *listing;
static char bytes[256];
static struct iovec parts = {bytes, 100};
static struct flock region = {.l_type = F_RDLCK, .l_whence = SEEK_CUR, .l_len = 10};
static struct stat info;
static struct stat64 info64;
static struct statx infox;
static struct statfs system_info;
static struct statfs64 system_info64;
static struct statvfs volume;
static struct statvfs64 volume64;
static jmp_buf back;
static sigjmp_buf sigback;
static long failed; /* by errno of the calls that must not fail */

#define OK(call) \
    if ((call) == -1) \
        failed = errno ? errno : -1;
#define CLOSES(call) \
    { \
        int opened = call; \
        OK(opened) \
        close(opened); \
    }
#define ENDS(stream_of) \
    { \
        FILE *file = stream_of; \
        if (!file) \
            failed = errno; \
        else \
            fclose(file); \
    }
#define CHILD(how, what) \
    { \
        int status = 0; \
        pid_t child = how(); \
        if (!child) { \
            what; \
        } \
        if (waitpid(child, &status, 0) != child || status) \
            failed = status; \
    }
#define JUMPS(sets, jumps) \
    if (!sets) \
        jumps;
static char *const nothing[] = {"true", NULL};

static void send_number(int many) {
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr header;
    } control;
    struct msghdr message = {.msg_iov = &parts, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    control.header = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.header), &source, sizeof source);
    struct mmsghdr messages = {.msg_hdr = message};
    OK(many ? sendmmsg(sockets[0], &messages, 1, 0) : sendmsg(sockets[0], &message, 0))
}

static void spawn(int by_path) {
    posix_spawn_file_actions_t actions;
    int status = 0;
    pid_t child = 0;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, source, 0);
    failed = by_path ? posix_spawnp(&child, "true", &actions, NULL, nothing, environ)
                     : posix_spawn(&child, "/bin/true", &actions, NULL, nothing, environ);
    posix_spawn_file_actions_destroy(&actions);
    waitpid(child, &status, 0);
}

#define OPENS(X, where, path) \
    X(open_##where, CLOSES(open(path, O_RDONLY))) \
    X(open64_##where, CLOSES(open64(path, O_RDONLY))) \
    X(openat_##where, CLOSES(openat(AT_FDCWD, path, O_RDONLY))) \
    X(openat64_##where, CLOSES(openat64(AT_FDCWD, path, O_RDONLY))) \
    X(__open_2_##where, CLOSES(__open_2(path, O_RDONLY))) \
    X(__open64_2_##where, CLOSES(__open64_2(path, O_RDONLY))) \
    X(__openat_2_##where, CLOSES(__openat_2(AT_FDCWD, path, O_RDONLY))) \
    X(__openat64_2_##where, CLOSES(__openat64_2(AT_FDCWD, path, O_RDONLY))) \
    X(fopen_##where, ENDS(fopen(path, "r"))) \
    X(fopen64_##where, ENDS(fopen64(path, "r"))) \
    X(freopen_##where, freopen(path, "r", stream)) \
    X(freopen64_##where, freopen64(path, "r", stream))
#define STATS(X, where, path) \
    X(stat_##where, OK(stat(path, &info))) \
    X(stat64_##where, OK(stat64(path, &info64))) \
    X(lstat_##where, OK(lstat(path, &info))) \
    X(lstat64_##where, OK(lstat64(path, &info64))) \
    X(fstatat_##where, OK(fstatat(AT_FDCWD, path, &info, 0))) \
    X(fstatat64_##where, OK(fstatat64(AT_FDCWD, path, &info64, AT_SYMLINK_NOFOLLOW))) \
    X(statx_##where, OK(statx(AT_FDCWD, path, 0, STATX_BASIC_STATS, &infox))) \
    X(access_##where, OK(access(path, R_OK))) \
    X(euidaccess_##where, OK(euidaccess(path, R_OK))) \
    X(eaccess_##where, OK(eaccess(path, R_OK))) \
    X(faccessat_##where, OK(faccessat(AT_FDCWD, path, R_OK, 0)))
#define WRITES(X, where, path) \
    X(open_writing_##where, CLOSES(open(path, O_RDWR | O_CREAT, 0600))) \
    X(creat_##where, CLOSES(creat(path, 0600))) \
    X(creat64_##where, CLOSES(creat64(path, 0600))) \
    X(fopen_writing_##where, ENDS(fopen(path, "r+"))) \
    X(freopen_writing_##where, freopen(path, "r+", stream)) \
    X(unlink_##where, OK(unlink(path))) \
    X(unlinkat_##where, OK(unlinkat(AT_FDCWD, path, 0))) \
    X(remove_##where, OK(remove(path))) \
    X(rename_##where, OK(rename(path, made))) \
    X(renameat_##where, OK(renameat(AT_FDCWD, path, AT_FDCWD, made))) \
    X(renameat2_##where, OK(renameat2(AT_FDCWD, path, AT_FDCWD, made, 0))) \
    X(truncate_##where, OK(truncate(path, 3))) \
    X(truncate64_##where, OK(truncate64(path, 3))) \
    X(chmod_##where, OK(chmod(path, 0600))) \
    X(fchmodat_##where, OK(fchmodat(AT_FDCWD, path, 0600, 0))) \
    X(utime_##where, OK(utime(path, NULL))) \
    X(utimes_##where, OK(utimes(path, NULL))) \
    X(lutimes_##where, OK(lutimes(path, NULL))) \
    X(futimesat_##where, OK(futimesat(AT_FDCWD, path, NULL))) \
    X(utimensat_##where, OK(utimensat(AT_FDCWD, path, NULL, 0))) \
    X(chown_##where, OK(chown(path, -1, -1))) \
    X(lchown_##where, OK(lchown(path, -1, -1))) \
    X(fchownat_##where, OK(fchownat(AT_FDCWD, path, -1, -1, 0))) \
    X(setxattr_##where, setxattr(path, "user.a", "b", 1, 0)) \
    X(lsetxattr_##where, lsetxattr(path, "user.a", "b", 1, 0)) \
    X(removexattr_##where, removexattr(path, "user.a")) \
    X(lremovexattr_##where, lremovexattr(path, "user.a")) \
    X(link_##where, OK(link(path, made))) \
    X(linkat_##where, OK(linkat(AT_FDCWD, path, AT_FDCWD, made, 0))) \
    X(symlink_##where, OK(symlink(path, made))) \
    X(symlinkat_##where, OK(symlinkat(path, AT_FDCWD, made)))
#define READS(X, where, fd) \
    X(read_##where, OK(read(fd, bytes, 100))) \
    X(__read_chk_##where, OK(__read_chk(fd, bytes, 100, sizeof bytes))) \
    X(pread_##where, OK(pread(fd, bytes, 100, 5))) \
    X(pread64_##where, OK(pread64(fd, bytes, 100, 5))) \
    X(__pread_chk_##where, OK(__pread_chk(fd, bytes, 100, 5, sizeof bytes))) \
    X(__pread64_chk_##where, OK(__pread64_chk(fd, bytes, 100, 5, sizeof bytes))) \
    X(readv_##where, OK(readv(fd, &parts, 1))) \
    X(preadv_##where, OK(preadv(fd, &parts, 1, 5))) \
    X(preadv64_##where, OK(preadv64(fd, &parts, 1, 5))) \
    X(preadv2_##where, OK(preadv2(fd, &parts, 1, 5, 0))) \
    X(preadv64v2_##where, OK(preadv64v2(fd, &parts, 1, 5, 0))) \
    X(sendfile_##where, OK(sendfile(sockets[0], fd, NULL, 100))) \
    X(sendfile64_##where, OK(sendfile64(sockets[0], fd, NULL, 100))) \
    X(splice_##where, splice(fd, NULL, sockets[0], NULL, 100, 0)) \
    X(copy_file_range_##where, copy_file_range(fd, NULL, sockets[0], NULL, 100, 0)) \
    X(mmap_##where, munmap(mmap(NULL, 100, PROT_READ, MAP_PRIVATE, fd, 0), 100)) \
    X(mmap64_##where, munmap(mmap64(NULL, 100, PROT_READ, MAP_PRIVATE, fd, 0), 100)) \
    X(lseek_##where, OK(lseek(fd, 5, SEEK_SET))) \
    X(lseek64_##where, OK(lseek64(fd, 5, SEEK_SET))) \
    X(fdopen_##where, ENDS(fdopen(dup(fd), "r")))
#define NUMBERS(X, where, fd) \
    X(fstat_##where, OK(fstat(fd, &info))) \
    X(fstat64_##where, OK(fstat64(fd, &info64))) \
    X(fstatat_empty_##where, OK(fstatat(fd, "", &info, AT_EMPTY_PATH))) \
    X(statx_empty_##where, OK(statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS, &infox))) \
    X(flock_##where, OK(flock(fd, LOCK_SH))) \
    X(lockf_##where, lockf(fd, F_TLOCK, 10)) \
    X(lockf64_##where, lockf64(fd, F_TLOCK, 10)) \
    X(fcntl_##where, OK(fcntl(fd, F_SETLK, &region))) \
    X(fcntl64_##where, OK(fcntl64(fd, F_GETLK, &region))) \
    X(fcntl_dup_##where, OK(fcntl(fd, F_DUPFD, 100))) \
    X(fcntl_flags_##where, OK(fcntl(fd, F_SETFD, 0))) \
    X(fcntl_lease_##where, fcntl(fd, F_SETLEASE, F_RDLCK)) \
    X(fchmod_##where, OK(fchmod(fd, 0600))) \
    X(fchown_##where, OK(fchown(fd, -1, -1))) \
    X(futimens_##where, OK(futimens(fd, NULL))) \
    X(futimes_##where, OK(futimes(fd, NULL))) \
    X(fsetxattr_##where, fsetxattr(fd, "user.a", "b", 1, 0)) \
    X(fremovexattr_##where, fremovexattr(fd, "user.a")) \
    X(fgetxattr_##where, fgetxattr(fd, "user.a", bytes, 1)) \
    X(flistxattr_##where, flistxattr(fd, bytes, 100)) \
    X(ioctl_##where, ioctl(fd, _IOR('f', 1, long), bytes)) \
    X(fstatfs_##where, OK(fstatfs(fd, &system_info))) \
    X(fstatfs64_##where, OK(fstatfs64(fd, &system_info64))) \
    X(fstatvfs_##where, OK(fstatvfs(fd, &volume))) \
    X(fstatvfs64_##where, OK(fstatvfs64(fd, &volume64))) \
    X(dup_##where, CLOSES(dup(fd))) \
    X(dup2_##where, OK(dup2(fd, 200))) \
    X(dup2_to_##where, OK(dup2(0, fd))) \
    X(dup3_##where, OK(dup3(fd, 201, O_CLOEXEC))) \
    X(close_##where, OK(close(fd))) \
    X(close_range_##where, OK(close_range(fd, fd, 0)))
#define OTHERS(X) \
    X(openat_folder, CLOSES(openat(at, "hit", O_RDONLY))) \
    X(fstatat_folder, OK(fstatat(at, "miss", &info, 0))) \
    X(unlinkat_folder, OK(unlinkat(at, "hit", 0))) \
    X(fread_stream, fread(bytes, 1, 100, stream)) \
    X(__fread_chk_stream, __fread_chk(bytes, sizeof bytes, 1, 100, stream)) \
    X(fclose_stream, OK(fclose(stream))) \
    X(closefrom_all, closefrom(1000)) \
    X(opendir_folder, closedir(opendir(folder))) \
    X(readdir_folder, readdir(listing)) \
    X(readdir64_folder, readdir64(listing)) \
    X(chdir_folder, OK(chdir(folder)); OK(chdir("/"))) \
    X(fchdir_folder, OK(fchdir(at)); OK(open("hit", O_RDONLY)); OK(open("../" , O_RDONLY)); OK(chdir("/"))) \
    X(_exit_child, CHILD(fork, _exit(0))) \
    X(_Exit_child, CHILD(fork, _Exit(0))) \
    X(_Fork_child, CHILD(_Fork, _exit(0))) \
    X(vfork_child, CHILD(vfork, _exit(0))) \
    X(posix_spawn_child, spawn(0)) \
    X(posix_spawnp_child, spawn(1)) \
    X(system_child, OK(system("true"))) \
    X(popen_child, pclose(popen("true", "r"))) \
    X(longjmp_back, JUMPS(setjmp(back), longjmp(back, 1))) \
    X(_longjmp_back, JUMPS(_setjmp(back), _longjmp(back, 1))) \
    X(siglongjmp_back, JUMPS(sigsetjmp(sigback, 1), siglongjmp(sigback, 1))) \
    X(__longjmp_chk_back, JUMPS(setjmp(back), __longjmp_chk(back, 1))) \
    X(sendmsg_number, send_number(0)) \
    X(sendmmsg_number, send_number(1)) \
    X(dlsym_object, dlsym(dlopen("libm.so.6", RTLD_NOW), "cos"))
#define CASES(X) \
    OPENS(X, hit, hit) OPENS(X, miss, miss) OPENS(X, alias, alias) OPENS(X, dots, dots) OPENS(X, beyond, beyond) \
    OPENS(X, outside, outside) STATS(X, hit, hit) STATS(X, miss, miss) STATS(X, alias, alias) STATS(X, beyond, beyond) \
    STATS(X, outside, outside) WRITES(X, hit, hit) WRITES(X, miss, miss) WRITES(X, alias, alias) \
    WRITES(X, outside, outside) READS(X, copy, copy) READS(X, source, source) NUMBERS(X, copy, copy) \
    NUMBERS(X, source, source) OTHERS(X)

#define FUNCTION(name, call) \
    static void case_##name(void) { call; }
CASES(FUNCTION)
static void none(void) {}
#define ENTRY(name, call) {#name, case_##name},
static const struct test {
    const char *name;
    void (*run)(void);
} tests[] = {{"none", none}, CASES(ENTRY){NULL, NULL}};

const char *name_of(int number) {
    return tests[number].name;
}

/* `below`: the case's directory in the dataset; `beside`: one outside, in which `up` is a link to it. */
static void begin(const char *below, const char *beside) {
    snprintf(folder, sizeof folder, "%s", below);
    snprintf(hit, sizeof hit, "%s/hit", below);
    snprintf(miss, sizeof miss, "%s/miss", below);
    snprintf(made, sizeof made, "%s/made", below);
    snprintf(alias, sizeof alias, "%s/up/hit", beside);
    snprintf(dots, sizeof dots, "%s/sub/../hit", below);
    snprintf(beyond, sizeof beyond, "%s/up/sub/../hit", beside);
    snprintf(outside, sizeof outside, "%s/file", beside);
    at = open(below, O_RDONLY | O_DIRECTORY);
    copy = open(hit, O_RDWR & 0);
    source = open(miss, O_RDONLY);
    stream = fopen(hit, "r");
    listing = opendir(below);
    socketpair(AF_UNIX, SOCK_STREAM, 0, sockets);
    region.l_type = F_RDLCK;
    failed = errno = 0;
}

static void *in_thread(void *test) {
    ((const struct test *)test)->run();
    return NULL;
}

static const struct test *signalled;
static void handler(int number) {
    signalled->run();
}

/* Returns how much of a roomy stack was used. */
static long painted(const struct test *test) {
    pthread_attr_t attributes;
    pthread_t thread;
    unsigned char *stack = mmap(NULL, ROOMY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *used = stack;
    memset(stack, PAINT, ROOMY);
    pthread_attr_init(&attributes);
    pthread_attr_setstack(&attributes, stack, ROOMY);
    if (pthread_create(&thread, &attributes, in_thread, (void *)test) != 0)
        return -1;
    pthread_join(thread, NULL);
    while (*used == PAINT)
        used++;
    long depth = stack + ROOMY - used;
    munmap(stack, ROOMY);
    return depth;
}

static long on_small_stack(const struct test *test) {
    pthread_attr_t attributes;
    pthread_t thread;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN);
    if (pthread_create(&thread, &attributes, in_thread, (void *)test) != 0)
        return -1;
    return pthread_join(thread, NULL);
}

/* The kernel's frame is larger where the processor has more state; the handler has what is left of 8 kB on most. */
static long in_handler(const struct test *test) {
    size_t frame = getauxval(AT_MINSIGSTKSZ), n = frame > 3632 ? (frame + 4560 + 4095) / 4096 * 4096 : 8192;
    char *room = mmap(NULL, n + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack_t stack = {.ss_sp = room + 4096, .ss_size = n}, before;
    mprotect(room + 4096, n, PROT_READ | PROT_WRITE);
    signalled = test;
    if (sigaltstack(&stack, &before) != 0)
        return -1;
    sigaction(SIGUSR1, &(struct sigaction){.sa_handler = handler, .sa_flags = SA_ONSTACK | SA_NODEFER}, NULL);
    raise(SIGUSR1);
    sigaltstack(&before, NULL);
    munmap(room, n + 8192);
    return 0;
}

static long (*const ways[])(const struct test *) = {painted, on_small_stack, in_handler};

/* Returns what the way returns, or how a call failed that must not. */
long run_case(int number, int way, const char *below, const char *beside) {
    begin(below, beside);
    long result = ways[way](&tests[number]);
    return failed ? -1000 - failed : result;
}

/* The same on a descriptor that is open: how much of a roomy stack one case used. */
long depth_on(const char *name, int fd) {
    const struct test *test = tests;
    while (test->name && strcmp(test->name, name))
        test++;
    source = copy = fd;
    return test->name ? painted(test) : -1;
}
