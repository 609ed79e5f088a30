/* Resolves names that are not below a dataset as they are written, but lead below one through symbolic links.
 *
 * An absolute name is taken apart from the left, and every component that is a link is replaced by what it says, until
 * the directory of a map is reached or no link is left. From there on the name is treated like any name below the map.
 *
 * Two things are remembered, both in fixed memory. A directory that leads nowhere near a dataset is passed over for
 * REMEMBERED_S seconds; that can only cost a copy, never serve one. A spelling that leads below a dataset is believed
 * for the rest of a second, and only while every link on its way reads as it did: the links are read at each use.
 * Within that second a change that no link shows (a directory on the way is replaced by another) is noticed only if
 * this process made it. Calls that change something (AFRESH) use nothing that is remembered.
 */
#include "_native.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINKS_MAX 40 /* as in the kernel */
#define DIRECTORIES 8192
#define REMEMBERED_S 10
#define LOOKS 32 /* so many opens in a directory are looked at for being links themselves, then one in LOOKS_PERIOD */
#define LOOKS_PERIOD 64
#define ALIASES 32
#define ALIAS_TEXT 1000

static unsigned generation; /* of what is remembered */

static unsigned now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (unsigned)t.tv_sec;
}

void names_forget(void) {
    __atomic_fetch_add(&generation, 1, __ATOMIC_RELAXED);
}

/* ---- directories that lead elsewhere: one word each; the last writer wins ---- */
enum {
    LOOKED = 0x7f, /* a counter */
    PLAIN = 1 << 7, /* no link on the way */
    OF_LINKS = 1 << 8, /* holds links to files of a dataset */
    KNOWN = 1 << 9,
    SINCE_AT = 10, SINCE = 0x3fff, /* seconds */
    GENERATION_AT = 24, GENERATION = 0xff,
};
static uint64_t directories[DIRECTORIES];

static uint64_t hash_of(const char *text, size_t n) {
    uint64_t h = n * 0x9e3779b97f4a7c15ull, part;
    for (; n >= 8; text += 8, n -= 8) {
        memcpy(&part, text, 8);
        h = (h ^ part) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    part = 0;
    memcpy(&part, text, n);
    h = (h ^ part) * 0xc4ceb9fe1a85ec53ull;
    return h ^ h >> 29;
}

static uint64_t *directory_at(uint64_t hash) {
    return &directories[hash % DIRECTORIES];
}

static uint64_t as_remembered(uint64_t hash, unsigned facts) {
    uint64_t now = (uint64_t)(now_s() & SINCE) << SINCE_AT;
    uint64_t age = (uint64_t)(__atomic_load_n(&generation, __ATOMIC_RELAXED) & GENERATION) << GENERATION_AT;
    return (hash >> 32 << 32) | age | now | KNOWN | facts;
}

/* Returns what is known of a directory, or 0. */
static unsigned known(uint64_t hash) {
    uint64_t found = __atomic_load_n(directory_at(hash), __ATOMIC_RELAXED);
    if (found >> 32 != hash >> 32 || !(found & KNOWN) ||
        (found >> GENERATION_AT & GENERATION) != (__atomic_load_n(&generation, __ATOMIC_RELAXED) & GENERATION))
        return 0;
    return ((now_s() - (unsigned)(found >> SINCE_AT)) & SINCE) < REMEMBERED_S ? (unsigned)found : 0;
}

/* Adds to what is known of a directory; the time at which it is forgotten stays. */
static void remember(uint64_t hash, unsigned facts) {
    uint64_t *at = directory_at(hash);
    uint64_t word = known(hash) ? __atomic_load_n(at, __ATOMIC_RELAXED) | facts : as_remembered(hash, facts);
    __atomic_store_n(at, word, __ATOMIC_RELAXED);
}

static void looked(uint64_t hash, int is_link) {
    uint64_t found = __atomic_load_n(directory_at(hash), __ATOMIC_RELAXED);
    unsigned count = (unsigned)found & LOOKED;
    if (found >> 32 != hash >> 32)
        return;
    found = (found & ~(uint64_t)LOOKED) | (count == LOOKED ? LOOKS_PERIOD : count + 1) | (is_link ? OF_LINKS : 0);
    __atomic_store_n(directory_at(hash), found, __ATOMIC_RELAXED);
}

static int to_be_looked_at(unsigned facts) {
    unsigned count = facts & LOOKED;
    return (facts & OF_LINKS) || count < LOOKS || count % LOOKS_PERIOD == 0;
}

static size_t directory_n(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) : 0;
}

int names_lead_outside(const char *path, int how) {
    uint64_t hash = hash_of(path, directory_n(path));
    unsigned facts = known(hash);
    if (!facts)
        return 0;
    if (!(how & OPENS))
        return !(facts & OF_LINKS);
    if (to_be_looked_at(facts))
        return 0;
    looked(hash, 0);
    return 1;
}

void names_plain(const char *directory, size_t n) {
    remember(hash_of(directory, n), PLAIN);
}

/* ---- spellings that lead below a dataset ---- */
struct alias {
    unsigned seq; /* odd while it is written */
    unsigned since_s, generation;
    uint16_t spelt_n, inside_at, links_at, text_n; /* spelt_n 0: none */
    const struct map *map;
    char text[ALIAS_TEXT]; /* the spelling, the part below the map, then each link and what it says; all end with 0 */
};
static struct alias aliases[ALIASES];
static unsigned next_alias;

void names_forked(void) {
    names_forget();
    for (int i = 0; i < ALIASES; i++)
        aliases[i].seq = aliases[i].spelt_n = 0;
}

static int copy_alias(struct alias *from, const char *path, struct alias *to) {
    unsigned seq = __atomic_load_n(&from->seq, __ATOMIC_ACQUIRE);
    size_t n = from->spelt_n;
    if ((seq & 1) || !n || strncmp(path, from->text, n) != 0 || path[n] != '/')
        return 0;
    memcpy(to, from, offsetof(struct alias, text));
    memcpy(to->text, from->text, to->text_n < ALIAS_TEXT ? to->text_n : ALIAS_TEXT);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&from->seq, __ATOMIC_RELAXED) == seq && to->spelt_n == n;
}

/* A copy of an alias, and what one of its links says. */
struct tried {
    struct alias alias;
    char says[ALIAS_TEXT];
};
_Static_assert(sizeof(struct tried) <= ROOM_BYTES, "tried");

static int still_true(struct tried *tried) {
    const struct alias *alias = &tried->alias;
    if (alias->since_s != now_s() || alias->generation != __atomic_load_n(&generation, __ATOMIC_RELAXED))
        return 0;
    for (const char *link = alias->text + alias->links_at; link < alias->text + alias->text_n;) {
        const char *said = link + strlen(link) + 1;
        size_t n = strlen(said);
        if (readlink(link, tried->says, sizeof tried->says) != (ssize_t)n || memcmp(tried->says, said, n) != 0)
            return 0;
        link = said + n + 1;
    }
    return 1;
}

static enum kind locate_by_alias(const char *path, struct place *at) {
    ROOM(struct tried, tried);
    for (int i = 0; tried && i < ALIASES; i++)
        if (copy_alias(&aliases[i], path, &tried->alias) && still_true(tried))
            return place_below(tried->alias.map, tried->alias.text + tried->alias.inside_at,
                               path + tried->alias.spelt_n, at);
    return OUTSIDE;
}

/* Takes the place of the same spelling, else of the oldest one. */
static void keep_alias(const struct alias *alias) {
    struct alias *to = NULL;
    for (int i = 0; i < ALIASES && !to; i++)
        if (aliases[i].spelt_n == alias->spelt_n && memcmp(aliases[i].text, alias->text, alias->spelt_n) == 0)
            to = &aliases[i];
    if (!to)
        to = &aliases[__atomic_fetch_add(&next_alias, 1, __ATOMIC_RELAXED) % ALIASES];
    unsigned seq = __atomic_load_n(&to->seq, __ATOMIC_RELAXED);
    if ((seq & 1) || !__atomic_compare_exchange_n(&to->seq, &seq, seq + 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    __atomic_thread_fence(__ATOMIC_RELEASE);
    memcpy((char *)to + sizeof to->seq, (const char *)alias + sizeof to->seq,
           offsetof(struct alias, text) + alias->text_n - sizeof to->seq);
    __atomic_store_n(&to->seq, seq + 2, __ATOMIC_RELEASE);
}

/* ---- taking a name apart ---- */
struct walk {
    char *name; /* PATH_MAX; what was walked: without links, empty for the root directory */
    size_t n;
    char *left; /* PATH_MAX; what is still to walk: ends where the buffer ends */
    size_t at, own, end; /* in `left`: the next byte, the first that the caller wrote, the end of what is looked at */
    int whole;           /* whether the last component is walked too, which may be a file */
    int reads;           /* if set, a link to an open file stands for that file, whatever has its name by now */
    int trusts;          /* whether directories that were plain lately are taken as plain */
    int links;           /* the number of links that were followed */
    int relative;        /* whether a link was followed that depends on where it is */
    const struct map *map;
    struct alias *found; /* text_n 0: does not fit */
};

enum step { GOES_ON, REACHED, ENDS };

/* Returns the map in which the walk is, once nothing that is left could lead out of it again. */
static const struct map *map_of(const struct walk *w) {
    for (const char *p = w->left + w->at; (p = strstr(p, "/..")); p += 3)
        if (p[3] == '/' || !p[3])
            return NULL;
    for (int i = 0; i < config.maps_n; i++) {
        const struct map *map = &config.maps[i];
        if (map->source_n <= w->n && memcmp(map->source, w->name, map->source_n) == 0 &&
            (w->name[map->source_n] == '/' || w->n == map->source_n))
            return map;
    }
    return NULL;
}

static void note(struct alias *found, const char *text, size_t n) {
    if (!found->text_n || found->text_n + n + 1 > ALIAS_TEXT) {
        found->text_n = 0;
        return;
    }
    memcpy(found->text + found->text_n, text, n);
    found->text_n = (uint16_t)(found->text_n + n + 1);
    found->text[found->text_n - 1] = 0;
}

/* Puts what the link says (n bytes, where `left` begins) before what is left. */
static enum step follow(struct walk *w, size_t parent_n, size_t n) {
    int is_absolute = w->left[0] == '/';
    note(w->found, w->name, w->n);
    note(w->found, w->left, n);
    if (n == 0 || n > w->at || ++w->links > LINKS_MAX)
        return ENDS;
    if (w->own < w->at)
        w->own = w->at;
    w->at -= n;
    memmove(w->left + w->at, w->left, n);
    w->n = is_absolute ? 0 : parent_n;
    w->relative |= !is_absolute;
    return GOES_ON;
}

/* Takes the component from `at` on. */
static enum step step(struct walk *w) {
    const char *begin = w->left + w->at, *end = begin, *last = w->left + w->end;
    while (end < last && *end != '/')
        end++;
    size_t n = (size_t)(end - begin), parent_n = w->n;
    w->at += n;
    if (n == 1 && begin[0] == '.')
        return GOES_ON;
    if (n == 2 && begin[0] == '.' && begin[1] == '.') {
        while (w->n > 0 && w->name[--w->n] != '/')
            ;
        w->name[w->n] = 0;
        w->map = map_of(w);
        return w->map ? REACHED : GOES_ON;
    }
    if (w->n + 1 + n >= PATH_MAX)
        return ENDS;
    w->name[w->n] = '/';
    memcpy(w->name + w->n + 1, begin, n);
    w->n += 1 + n;
    w->name[w->n] = 0;
    w->map = map_of(w);
    if (w->map)
        return REACHED;
    int is_last = w->whole && w->at >= w->end;
    if (is_last && w->reads && strncmp(w->name, "/proc/", 6) == 0)
        return ENDS;
    uint64_t hash = hash_of(w->name, w->n);
    if (w->trusts && (known(hash) & PLAIN))
        return GOES_ON;
    ssize_t said = readlink(w->name, w->left, w->at); /* the walked part is not needed any more */
    if (said >= 0)
        return (size_t)said < w->at ? follow(w, parent_n, (size_t)said) : ENDS;
    if (errno != EINVAL)
        return ENDS;
    if (!is_last)
        remember(hash, PLAIN);
    return GOES_ON;
}

static enum step run(struct walk *w, const char *path, size_t n) {
    w->n = 0;
    w->at = w->own = PATH_MAX - 1 - n;
    w->end = w->at + (w->whole ? n : directory_n(path));
    w->relative = w->links = 0;
    w->found->text_n = 1; /* a place for nothing, so that 0 can say that it does not fit */
    memcpy(w->left + w->at, path, n + 1);
    enum step found = GOES_ON;
    while (found == GOES_ON) {
        while (w->at < w->end && w->left[w->at] == '/')
            w->at++;
        if (w->at >= w->end)
            return ENDS;
        found = step(w);
    }
    return found;
}

/* The spelling is what the caller wrote up to this point of the walk, if the last link was among it. */
static void keep(struct walk *w, const char *path, size_t n, unsigned age) {
    struct alias *alias = w->found;
    size_t own = w->own > w->at ? w->own : w->at, linked_n = own - w->at, spelt_n = n - (PATH_MAX - 1 - own);
    size_t named_n = w->n - w->map->source_n, links_at = spelt_n + 1 + named_n + linked_n + 1;
    if (!alias->text_n || links_at + alias->text_n > ALIAS_TEXT)
        return;
    memmove(alias->text + links_at, alias->text + 1, alias->text_n - 1u);
    memcpy(alias->text, path, spelt_n);
    alias->text[spelt_n] = 0;
    memcpy(alias->text + spelt_n + 1, w->name + w->map->source_n, named_n);
    memcpy(alias->text + spelt_n + 1 + named_n, w->left + w->at, linked_n);
    alias->text[links_at - 1] = 0;
    alias->map = w->map;
    alias->since_s = now_s();
    alias->generation = age;
    alias->spelt_n = (uint16_t)spelt_n;
    alias->inside_at = (uint16_t)(spelt_n + 1);
    alias->links_at = (uint16_t)links_at;
    alias->text_n = (uint16_t)(links_at + alias->text_n - 1);
    keep_alias(alias);
}

/* Walks the whole name, or only its directory. */
static __attribute__((noinline)) enum kind walked(const char *path, int whole, int how, struct place *at) {
    ROOM(char, name);
    ROOM(char, left);
    ROOM(struct alias, found_alias);
    struct walk w = {.name = name, .left = left, .found = found_alias};
    size_t n = strlen(path);
    unsigned age = __atomic_load_n(&generation, __ATOMIC_RELAXED);
    if (n >= PATH_MAX || !name || !left || !found_alias)
        return OUTSIDE;
    w.whole = whole;
    w.reads = w.trusts = !(how & AFRESH);
    enum step found = run(&w, path, n);
    if (found == REACHED && w.trusts && (w.relative || !whole)) {
        w.trusts = 0;
        found = run(&w, path, n);
    }
    if (found != REACHED)
        return OUTSIDE;
    enum kind kind = place_below(w.map, w.name + w.map->source_n, w.left + w.at, at);
    if (!whole && (kind == FILE_NAME || kind == DIR_NAME))
        keep(&w, path, n, age);
    return kind;
}

static enum kind locate_as_known(const char *path, int how, struct place *at) {
    uint64_t hash = hash_of(path, directory_n(path));
    unsigned facts = known(hash);
    if (!facts) {
        enum kind kind = locate_by_alias(path, at);
        if (kind == OUTSIDE)
            kind = walked(path, 0, how, at);
        if (kind != OUTSIDE)
            return kind;
        remember(hash, 0);
        facts = known(hash);
    }
    if (!(how & FOLLOWED) || !((facts & OF_LINKS) || ((how & OPENS) && to_be_looked_at(facts))))
        return OUTSIDE;
    enum kind kind = walked(path, 1, how, at);
    looked(hash, kind == FILE_NAME);
    return kind;
}

enum kind locate_by_links(const char *path, int how, struct place *at) {
    int saved = errno;
    enum kind kind = how & AFRESH ? walked(path, how & FOLLOWED, how, at) : locate_as_known(path, how, at);
    errno = saved;
    return kind;
}
