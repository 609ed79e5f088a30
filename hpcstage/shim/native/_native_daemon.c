/* Asks the daemon: REQUEST (a file is not in the store) and WROTE (a write begins). Every wait is bounded. */
#include "_native.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#define WROTE_CAP_NS 3000000000ull /* longer than the daemon waits for other nodes */
#define STARTING_CAP_NS 500000000ull /* so long, and no longer, one open waits for a daemon that has yet to begin */
#define LARGE_BYTES (16 << 20) /* larger files are mostly read at the source while they are not whole in the store */
#define MOST_BYTES (8 + 16 + PATH_MAX)
#define SEND_CAP_NS 1000000000ull
#define HUNG_PAUSE_NS 5000000000ull /* after a time-out nobody of this process waits for so long */

struct reply {
    uint8_t version, answer;
    uint16_t reason;
    uint32_t value;
};
_Static_assert(sizeof(struct reply) == 8, "reply");

static uint64_t hung_until_ns;

static int wait_ms(uint64_t until_ns) {
    uint64_t now = now_ns();
    if (now >= until_ns)
        return 0;
    uint64_t ms = (until_ns - now + 999999) / 1000000;
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

/* Returns 0, or the Reason. A full backlog means that the daemon lives and is busy: tries again till the time is up. */
static int reach(int fd, uint64_t until_ns) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, config.sock, sizeof config.sock);
    while (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        if (errno != EAGAIN && errno != EINTR)
            return REASON_NO_DAEMON;
        if (!wait_ms(until_ns))
            return REASON_TIMEOUT;
        poll(NULL, 0, 1);
    }
    return 0;
}

static int hear(int fd, uint64_t until_ns, struct reply *reply) {
    for (;;) {
        ssize_t n = recv(fd, reply, sizeof *reply, MSG_DONTWAIT);
        if (n == (ssize_t)sizeof *reply && reply->version == VERSION)
            return 0;
        if (n >= 0 || (errno != EAGAIN && errno != EINTR))
            return REASON_NO_DAEMON;
        struct pollfd event = {.fd = fd, .events = POLLIN};
        int ms = wait_ms(until_ns);
        if (!ms)
            return REASON_TIMEOUT;
        poll(&event, 1, ms);
    }
}

struct message {
    char head[8];
    uint64_t numbers[2];
    struct iovec parts[4];
    size_t parts_n, n;
};

static void add(struct message *r, const void *data, size_t n) {
    r->parts[r->parts_n++] = (struct iovec){(void *)data, n};
    r->n += n;
}

static void begin_message(struct message *r, int kind) {
    uint32_t pid = (uint32_t)getpid();
    r->parts_n = r->n = 0;
    memset(r->head, 0, sizeof r->head);
    r->head[0] = VERSION;
    r->head[1] = (char)kind;
    memcpy(r->head + 4, &pid, 4);
    add(r, r->head, sizeof r->head);
}

static void add_source(struct message *r, const struct place *at) {
    const char *rest = at->local + at->map->store_n;
    add(r, at->map->source, at->map->source_n);
    add(r, rest, strlen(rest));
}

static int is_sent(int fd, const struct message *r) {
    struct msghdr message = {.msg_iov = (struct iovec *)r->parts, .msg_iovlen = r->parts_n};
    return sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)r->n;
}

/* Returns 0 and an answer, or the Reason why there is none. `sent` means that the daemon will read it if it lives. With
 * cap_ns 0 it is only sent, which gives TIMEOUT. */
static int ask(const struct message *r, uint64_t send_cap_ns, uint64_t cap_ns, struct reply *reply, int *sent) {
    *sent = 0;
    if (!config.sock[0] || r->n > MOST_BYTES)
        return REASON_NO_DAEMON;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return REASON_NO_DAEMON;
    uint64_t begin_ns = now_ns();
    int problem = reach(fd, begin_ns + send_cap_ns);
    if (!problem && !is_sent(fd, r))
        problem = REASON_NO_DAEMON;
    *sent = !problem;
    if (!problem)
        problem = cap_ns ? hear(fd, begin_ns + cap_ns, reply) : REASON_TIMEOUT;
    close(fd);
    return problem;
}

static int hung(void) {
    return now_ns() < __atomic_load_n(&hung_until_ns, __ATOMIC_RELAXED);
}

static int answered(int problem) {
    if (problem == REASON_TIMEOUT)
        __atomic_store_n(&hung_until_ns, now_ns() + HUNG_PAUSE_NS, __ATOMIC_RELAXED);
    return problem;
}

static int started_late;

static int ask_capped(const struct message *r, uint64_t cap_ns, struct reply *reply) {
    int sent;
    return ask(r, cap_ns, cap_ns, reply, &sent);
}

/* One open waits for a daemon that has yet to begin, and none of a large file, of which it would say that it is to be read
 * at the source. Returns the Reason not to wait, or REASON_NONE. */
static int why_not_early(const struct place *at) {
    ROOM(char, source);
    struct stat info;
    int saved = errno;
    if (!source || __atomic_load_n(&started_late, __ATOMIC_RELAXED))
        return REASON_SCANNING;
    source_of(at, source);
    int is_large = source[0] && stat(source, &info) == 0 && info.st_size > LARGE_BYTES;
    errno = saved;
    return is_large ? REASON_LARGE : REASON_NONE;
}

/* Asks before the daemon answers: what is opened now would be read here and then copied, so a short wait pays. */
static int ask_early(const struct message *r, struct reply *reply) {
    uint64_t cap_ns = config.request_cap_ns < STARTING_CAP_NS ? config.request_cap_ns : STARTING_CAP_NS;
    int problem = ask_capped(r, cap_ns, reply);
    if (problem)
        __atomic_store_n(&started_late, 1, __ATOMIC_RELAXED);
    return problem == REASON_TIMEOUT ? REASON_SCANNING : problem;
}

int request(const struct place *at) {
    uint32_t state = page_state();
    switch (state) {
    case STATE_STARTING:
    case STATE_SCANNING:
    case STATE_STAGING:
        break;
    case STATE_ENDED:
        return REASON_NO_DAEMON;
    default:
        return REASON_SETTLED;
    }
    int early = state == STATE_STARTING ? why_not_early(at) : REASON_NONE;
    if (early != REASON_NONE)
        return early;
    if (hung())
        return REASON_TIMEOUT;
    struct reply reply;
    struct message message;
    begin_message(&message, KIND_REQUEST);
    add_source(&message, at);
    uint64_t begin = wait_begin(FD_SOURCE);
    int problem = state == STATE_STARTING ? ask_early(&message, &reply)
                                          : answered(ask_capped(&message, config.request_cap_ns, &reply));
    count(COUNTER_WANTS, 1);
    wait_end(FD_SOURCE, begin);
    if (problem)
        return problem;
    if (reply.answer == ANSWER_READY)
        return -1;
    return reply.reason < COUNTERS - COUNTER_DIRECT_BASE ? reply.reason : REASON_UNKNOWN;
}

/* Takes a copy out of the store without the daemon. A directory is renamed aside as a whole. */
static void discard(const char *local) {
    if (unlink(local) == 0 || errno == ENOENT || errno == ENOTDIR)
        return;
    static unsigned serial;
    char name[64] = "/dropped-";
    ROOM(char, aside);
    char *end = put_number(name + 9, (unsigned)getpid());
    *end++ = '-';
    end = put_number(end, __atomic_fetch_add(&serial, 1, __ATOMIC_RELAXED));
    if (aside)
        node_path(aside, name, (size_t)(end - name));
    if ((!aside || rename(local, aside) != 0) && errno != ENOENT)
        count(COUNTER_ERRORS, 1);
}

/* Sends it always, and waits for the answer unless the daemon hangs. Returns 1 if the daemon has dropped all copies, or
 * nothing is served before it has. Returns 0 if it will not; nothing is served any more then, since only the daemon
 * knows the file's other names and what is being copied. */
static int tell(const struct message *r) {
    struct reply reply = {0};
    uint32_t state = page_state();
    int hangs = hung();
    uint64_t cap_ns = state == STATE_STARTING || hangs ? 0 : WROTE_CAP_NS;
    int sent = 0, problem = REASON_NO_DAEMON;
    if (state != STATE_ENDED)
        problem = ask(r, hangs && page_is_closed() ? 0 : SEND_CAP_NS, cap_ns, &reply, &sent);
    if (cap_ns || !sent)
        answered(problem);
    if (sent && problem == REASON_TIMEOUT) {
        page_give_up();
        return 1;
    }
    if (!problem && reply.answer == ANSWER_DONE)
        return 1;
    page_close();
    return 0;
}

static void begin_landed(struct message *r, const struct stat *info) {
    begin_message(r, KIND_LANDED);
    r->numbers[0] = info->st_dev;
    r->numbers[1] = info->st_ino;
    add(r, r->numbers, sizeof r->numbers);
}

/* Notes a write before the daemon knows the files. Returns 0 if it is too late for that. */
static int note_early(const struct stat *info) {
    static const char name[] = "/early"; /* EARLY_FILE */
    ROOM(char, path);
    uint64_t numbers[2] = {info->st_dev, info->st_ino};
    if (!path)
        return 0;
    node_path(path, name, sizeof name - 1);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return 0;
    int noted = write(fd, numbers, sizeof numbers) == sizeof numbers;
    close(fd);
    return noted && page_state() < STATE_STAGING;
}

/* With one name and no links in the datasets, the file is none of theirs: the name that it was opened by is not below
 * one. */
void landed(const struct stat *info) {
    int saved = errno;
    uint32_t state = page_state();
    if (!S_ISREG(info->st_mode) || config.direct || state == STATE_MEASURING || state == STATE_ENDED)
        return;
    int known = state >= STATE_STAGING;
    if (!(known && info->st_nlink == 1 && page_is_unlinked()) && (known || !note_early(info))) {
        struct message message;
        begin_landed(&message, info);
        tell(&message);
    }
    errno = saved;
}

void landed_fd(int fd) {
    struct stat info;
    int saved = errno;
    if (!config.direct && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && page_may_hold(info.st_dev)) {
        PLACE(at);
        if (locate_fd(fd, at) == FILE_NAME) {
            drop_file(at, &info);
            count(COUNTER_WRITE_OPENS, 1);
        } else {
            landed(&info);
        }
    }
    errno = saved;
}

void drop_all(const struct map *map) {
    struct message message;
    if (map->quiet || config.direct || page_state() == STATE_MEASURING)
        return;
    begin_message(&message, KIND_WROTE);
    add(&message, map->source, map->source_n);
    tell(&message);
}

void drop(const struct place *at) {
    drop_file(at, NULL);
}

void drop_file(const struct place *at, const struct stat *now) {
    int saved = errno;
    if (config.direct || page_state() == STATE_MEASURING)
        return;
    copies_change(at);
    int existed = access(at->local, F_OK) == 0;
    struct message message;
    if (now && S_ISREG(now->st_mode))
        begin_landed(&message, now);
    else
        begin_message(&message, KIND_WROTE);
    add_source(&message, at);
    if (!tell(&message) || page_is_closed()) /* where nothing is served here, other nodes may serve it */
        discard(at->local);
    if (existed)
        count(COUNTER_DROPPED, 1);
    errno = saved;
}
