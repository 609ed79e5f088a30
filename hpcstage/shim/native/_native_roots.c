/* Notices that a change of this process leads the names of the datasets elsewhere: a directory or a link above a root
 * was renamed, removed or replaced. What was staged of such a dataset is dropped. */
#include "_native.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

static uint64_t led_to[MAPS_MAX]; /* by map: what its source was when this process last changed something above files */
static int is_known;

static uint64_t leads_to(const struct map *map) {
    struct stat info;
    return stat(map->source, &info) == 0 ? ((uint64_t)info.st_dev * 0x9e3779b97f4a7c15ull) ^ info.st_ino : 0;
}

static int known_before(int turns) {
    if (turns && !__atomic_load_n(&is_known, __ATOMIC_ACQUIRE)) {
        for (int i = 0; i < config.maps_n; i++)
            led_to[i] = leads_to(&config.maps[i]);
        __atomic_store_n(&is_known, 1, __ATOMIC_RELEASE);
    }
    return turns;
}

int roots_before(int dirfd, const char *path) {
    struct stat info;
    int saved = errno;
    int is_other = !config.direct && path && fstatat(dirfd, path, &info, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISREG(info.st_mode);
    is_other = known_before(is_other);
    errno = saved;
    return is_other;
}

/* Asks for no size, which costs a shared file system more than the name. */
int roots_before_unlink(int dirfd, const char *path) {
    char target;
    int saved = errno;
    int is_link = known_before(!config.direct && path && readlinkat(dirfd, path, &target, 1) >= 0);
    errno = saved;
    return is_link;
}

int roots_after(int turns, int result) {
    int saved = errno;
    for (int i = 0; turns && result == 0 && i < config.maps_n; i++) {
        uint64_t now = leads_to(&config.maps[i]);
        if (__atomic_exchange_n(&led_to[i], now, __ATOMIC_RELAXED) != now)
            drop_all(&config.maps[i]);
    }
    errno = saved;
    return result;
}
