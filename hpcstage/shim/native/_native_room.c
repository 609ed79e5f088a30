/* Gives out room for names, of which a hook may need several. The stack of a thread or of a handler of a signal can be
 * smaller than one name.
 *
 * A thread takes what is free by one exchange and gives it back at the end of the call; a handler of a signal that comes
 * meanwhile takes other room. Where all is taken, the kernel is asked for more. What a thread had that is cancelled or that
 * jumps out of a call is not taken from it before it ends: where the jump was within the handler, the call goes on.
 */
#include "_native.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROOMS 256
#define FOR_A_THREAD 4 /* as many as a call usually needs: threads search from different places */

static struct room {
    pthread_t owner; /* 0: nobody */
    char bytes[ROOM_BYTES];
} __attribute__((aligned(64))) rooms[ROOMS];

static void *more(void) {
    int saved = errno;
    struct room *room =
        (struct room *)syscall(SYS_mmap, NULL, sizeof *room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);
    errno = saved;
    if (room != MAP_FAILED)
        return room->bytes;
    page_close(); /* names are not known any more, so writes would not be */
    return NULL;
}

void *room_take(void) {
    pthread_t self = pthread_self();
    unsigned first = (unsigned)((uint64_t)self * 0x9e3779b97f4a7c15ull >> 32) * FOR_A_THREAD;
    for (unsigned i = 0; i < ROOMS; i++) {
        struct room *room = &rooms[(first + i) % ROOMS];
        pthread_t nobody = 0;
        if (!__atomic_load_n(&room->owner, __ATOMIC_RELAXED) &&
            __atomic_compare_exchange_n(&room->owner, &nobody, self, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return room->bytes;
    }
    return more();
}

void room_give(void *variable) {
    char *bytes = *(char **)variable;
    if (!bytes)
        return;
    struct room *room = (struct room *)(bytes - offsetof(struct room, bytes));
    if (room >= rooms && room < rooms + ROOMS)
        __atomic_store_n(&room->owner, 0, __ATOMIC_RELEASE);
    else
        munmap(room, sizeof *room);
}

void rooms_left(void) {
    for (struct room *room = rooms; room < rooms + ROOMS; room++)
        if (__atomic_load_n(&room->owner, __ATOMIC_RELAXED) == pthread_self())
            __atomic_store_n(&room->owner, 0, __ATOMIC_RELEASE);
}

void rooms_forked(void) {
    for (struct room *room = rooms; room < rooms + ROOMS; room++)
        if (room->owner != pthread_self())
            room->owner = 0;
}

void node_path(char *out, const char *name, size_t n) {
    size_t directory_n = strlen(config.node_dir);
    memcpy(out, config.node_dir, directory_n);
    memcpy(out + directory_n, name, n);
    out[directory_n + n] = 0;
}

char *put_number(char *out, unsigned value) {
    char digits[12], *begin = digits + sizeof digits;
    do
        *--begin = (char)('0' + value % 10);
    while (value /= 10);
    size_t n = (size_t)(digits + sizeof digits - begin);
    memcpy(out, begin, n);
    return out + n;
}
