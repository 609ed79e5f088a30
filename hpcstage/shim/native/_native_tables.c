/* Redirects names in the import tables (GOT) of all loaded ELF objects but libc, the loader and this module.
 *
 * New objects are found when someone looks up a symbol in one (dlsym: Python does for every extension module), because
 * dlopen itself must not be wrapped: it resolves $ORIGIN by its caller. dlsym is entered through a piece of assembly
 * that jumps on to the original, so that RTLD_NEXT still sees its true caller. So is vfork, which returns twice. Who looks
 * up in an object what this module calls itself (`ctypes.CDLL(None).open`) gets the redirected function.
 *
 * A walk has two passes with a dladdr between them. dl_iterate_phdr shows objects that another thread's dlopen is still
 * relocating; touching those would corrupt them. dladdr waits for the loader's lock, so what the first pass saw is
 * complete in the second, and only that is touched.
 *
 * dl_iterate_phdr holds a lock that a forked child inherits as it is, with an owner that is not there. No thread forks
 * while another one is inside such a call of ours. What calls of others left locked is not touched: a child looks for
 * new objects only once the loader has added one in it, which takes the same lock.
 */
#include "_native.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define R_SLOT R_X86_64_JUMP_SLOT
#define R_GLOB R_X86_64_GLOB_DAT
#define R_ABS R_X86_64_64
#elif defined(__aarch64__)
#define R_SLOT R_AARCH64_JUMP_SLOT
#define R_GLOB R_AARCH64_GLOB_DAT
#define R_ABS R_AARCH64_ABS64
#else
#error "x86-64 and aarch64 only: elsewhere the Python layer is used"
#endif
#ifndef __GLIBC__
#error "glibc only: elsewhere the Python layer is used"
#endif

#define OBJECTS 4096
#define NAMES 512 /* power of two, well above the number of hooks */
#define MATCHES 256
#define WALK_WAITS 200 /* of 50 us */
#define FORK_WAITS 20000 /* of 50 us */
#define ROUNDS 8 /* others may load libraries without end */

enum state { NEW = 1, DONE };

struct object {
    uintptr_t base, headers;
    uint32_t name;
    int state;
    void **probe; /* one redirected slot: a library that was closed and loaded again has it fresh */
    void *probe_function;
};

static struct object objects[OBJECTS];
static unsigned objects_n, slots_n;
static struct {
    const struct hook *hook;
    void *original; /* as this module is bound */
} names[NAMES];
static uintptr_t own_base;
static unsigned long long seen_adds, seen_subs; /* by the first pass */
static unsigned long long done_adds, done_subs; /* by a whole walk */
static int walking, again;

__attribute__((visibility("hidden"))) void *hpcstage_real_dlsym;
__attribute__((visibility("hidden"))) void *hpcstage_dlsym_instead(void *handle, const char *name);
__attribute__((visibility("hidden"))) void *hpcstage_dlsym(void *, const char *);
__attribute__((visibility("hidden"))) void *hpcstage_real_vfork = (void *)vfork; /* a slot of our own table */
__attribute__((visibility("hidden"))) int hpcstage_vfork(void);

#if defined(__x86_64__)
__asm__(".text\n.hidden hpcstage_dlsym\n.globl hpcstage_dlsym\n.type hpcstage_dlsym,@function\n"
        "hpcstage_dlsym:\n"
        "endbr64\npush %rdi\npush %rsi\nsub $8,%rsp\n"
        "call hpcstage_dlsym_instead\n"
        "add $8,%rsp\npop %rsi\npop %rdi\n"
        "test %rax,%rax\njz 1f\nret\n"
        "1: jmp *hpcstage_real_dlsym(%rip)\n.size hpcstage_dlsym,.-hpcstage_dlsym\n"
        ".hidden hpcstage_vfork\n.globl hpcstage_vfork\n.type hpcstage_vfork,@function\n"
        "hpcstage_vfork:\n"
        "endbr64\nincl hpcstage_vforked(%rip)\n"
        "jmp *hpcstage_real_vfork(%rip)\n.size hpcstage_vfork,.-hpcstage_vfork\n");
#else
__asm__(".text\n.hidden hpcstage_dlsym\n.globl hpcstage_dlsym\n.type hpcstage_dlsym,%function\n"
        "hpcstage_dlsym:\n"
        "hint #34\nstp x29,x30,[sp,#-32]!\nstp x0,x1,[sp,#16]\n"
        "bl hpcstage_dlsym_instead\n"
        "mov x16,x0\nldp x0,x1,[sp,#16]\nldp x29,x30,[sp],#32\n"
        "cbz x16,1f\nmov x0,x16\nret\n"
        "1: adrp x16,hpcstage_real_dlsym\nldr x16,[x16,:lo12:hpcstage_real_dlsym]\nbr x16\n"
        ".size hpcstage_dlsym,.-hpcstage_dlsym\n"
        ".hidden hpcstage_vfork\n.globl hpcstage_vfork\n.type hpcstage_vfork,%function\n"
        "hpcstage_vfork:\n"
        "hint #34\nadrp x16,hpcstage_vforked\nldr w17,[x16,:lo12:hpcstage_vforked]\nadd w17,w17,#1\n"
        "str w17,[x16,:lo12:hpcstage_vforked]\n"
        "adrp x16,hpcstage_real_vfork\nldr x16,[x16,:lo12:hpcstage_real_vfork]\nbr x16\n"
        ".size hpcstage_vfork,.-hpcstage_vfork\n");
#endif

static const struct hook hook_dlsym = {"dlsym", (void *)hpcstage_dlsym}, hook_vfork = {"vfork", (void *)hpcstage_vfork};

static uint32_t hash_of(const char *name) {
    uint32_t h = 5381;
    for (; *name; name++)
        h = h * 33 + (unsigned char)*name;
    return h;
}

static void learn(const struct hook *hook) {
    uint32_t at = hash_of(hook->name);
    while (names[at % NAMES].hook)
        at++;
    names[at % NAMES].hook = hook;
}

static int index_of(const char *name) {
    if (name[0] == '_' && name[1] == 'Z')
        return -1;
    for (uint32_t at = hash_of(name); names[at % NAMES].hook; at++)
        if (strcmp(names[at % NAMES].hook->name, name) == 0)
            return (int)(at % NAMES);
    return -1;
}

/* ---- one object ---- */
struct tables {
    const ElfW(Sym) * symbols;
    const char *strings;
    const ElfW(Rela) * relocations[2];
    size_t n[2], relative;
    uint32_t undefined; /* symbols below this index include all undefined ones; 0: not known */
    uintptr_t sealed, sealed_end;
};

static int read_tables(const struct dl_phdr_info *info, struct tables *t) {
    const ElfW(Dyn) *d = NULL;
    const uint32_t *gnu_hash = NULL;
    uintptr_t base = info->dlpi_addr;
    memset(t, 0, sizeof *t);
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_DYNAMIC)
            d = (const void *)(base + p->p_vaddr);
        if (p->p_type == PT_GNU_RELRO) {
            t->sealed = base + p->p_vaddr;
            t->sealed_end = t->sealed + p->p_memsz;
        }
    }
    for (; d && d->d_tag != DT_NULL; d++) {
        /* glibc writes absolute addresses into this section, but not into a read-only one */
        const void *at = (const void *)(d->d_un.d_ptr < base ? d->d_un.d_ptr + base : d->d_un.d_ptr);
        switch (d->d_tag) {
        case DT_SYMTAB: t->symbols = at; break;
        case DT_STRTAB: t->strings = at; break;
        case DT_JMPREL: t->relocations[0] = at; break;
        case DT_PLTRELSZ: t->n[0] = d->d_un.d_val / sizeof(ElfW(Rela)); break;
        case DT_RELA: t->relocations[1] = at; break;
        case DT_RELASZ: t->n[1] = d->d_un.d_val / sizeof(ElfW(Rela)); break;
        case DT_RELACOUNT: t->relative = d->d_un.d_val; break;
        case DT_GNU_HASH: gnu_hash = at; break;
        }
    }
    if (gnu_hash && gnu_hash[0] > 0)
        t->undefined = gnu_hash[1];
    return t->symbols && t->strings;
}

struct matches {
    uint32_t symbol[MATCHES];
    int name[MATCHES];
    unsigned n;
    uint64_t bloom;
};

static void find_matches(const struct tables *t, struct matches *m) {
    m->n = 0;
    m->bloom = 0;
    for (uint32_t i = 1; i < t->undefined && m->n < MATCHES; i++) {
        int name = t->symbols[i].st_shndx == SHN_UNDEF ? index_of(t->strings + t->symbols[i].st_name) : -1;
        if (name < 0)
            continue;
        m->symbol[m->n] = i;
        m->name[m->n++] = name;
        m->bloom |= 1ull << (i & 63);
    }
}

static int name_for(const struct tables *t, const struct matches *m, uint32_t symbol) {
    if (symbol >= t->undefined) {
        /* a main program at a fixed address lists functions whose address it takes among the defined ones */
        const ElfW(Sym) *s = &t->symbols[symbol];
        return s->st_shndx == SHN_UNDEF ? index_of(t->strings + s->st_name) : -1;
    }
    if (!(m->bloom >> (symbol & 63) & 1))
        return -1;
    for (unsigned i = 0; i < m->n; i++)
        if (m->symbol[i] == symbol)
            return m->name[i];
    return -1;
}

struct slot {
    void **at;
    int name, sealed, data; /* data: an initialised variable, which the program may have changed since */
};
typedef void visit(const struct slot *slot, const struct tables *t, void *context);

static void each_slot(const struct dl_phdr_info *info, const struct tables *t, visit *visit, void *context) {
    static struct matches m; /* one walk at a time */
    find_matches(t, &m);
    for (int table = 0; table < 2; table++) {
        const ElfW(Rela) *r = t->relocations[table];
        for (size_t i = table ? t->relative : 0; r && i < t->n[table]; i++) {
            uint32_t type = ELF64_R_TYPE(r[i].r_info), symbol = ELF64_R_SYM(r[i].r_info);
            if (!symbol || (type != R_SLOT && type != R_GLOB && type != R_ABS) || (type == R_ABS && r[i].r_addend))
                continue;
            int name = name_for(t, &m, symbol);
            if (name < 0)
                continue;
            uintptr_t at = info->dlpi_addr + r[i].r_offset;
            int sealed = at >= t->sealed && at < t->sealed_end;
            visit(&(struct slot){(void **)at, name, sealed, type == R_ABS && !sealed}, t, context);
        }
    }
}

static int open_sealed(const struct tables *t, int protection) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t from = t->sealed & ~(page - 1), to = t->sealed_end & ~(page - 1); /* the loader seals whole pages only */
    return from < to ? mprotect((void *)from, to - from, protection) : 0;
}

struct redirect {
    struct object *object;
    int unsealed;
};

static void redirect_slot(const struct slot *slot, const struct tables *t, void *context) {
    struct redirect *to = context;
    void *function = names[slot->name].hook->function;
    if (slot->data && *slot->at != names[slot->name].original)
        return;
    if (*slot->at != function) {
        if (slot->sealed && !to->unsealed && open_sealed(t, PROT_READ | PROT_WRITE) != 0)
            return;
        to->unsealed |= slot->sealed;
        __atomic_store_n(slot->at, function, __ATOMIC_RELEASE);
        slots_n++;
    }
    if (!slot->data) {
        to->object->probe = slot->at;
        to->object->probe_function = function;
    }
}

static void redirect(const struct dl_phdr_info *info, struct object *object) {
    struct tables t;
    struct redirect to = {object, 0};
    if (!read_tables(info, &t))
        return;
    each_slot(info, &t, redirect_slot, &to);
    if (to.unsealed)
        open_sealed(&t, PROT_READ);
}

/* ---- forks and the loader's lock ---- */
static const struct timespec pause_50us = {0, 50000};
static int iterating, forking; /* how many threads are inside dl_iterate_phdr for us, or inside fork */
static const struct link_map *last_inherited; /* in a forked child, until the loader adds an object */

static void begin_iteration(void) {
    for (int i = 0; i < FORK_WAITS; i++) {
        __atomic_add_fetch(&iterating, 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&forking, __ATOMIC_SEQ_CST))
            return;
        __atomic_sub_fetch(&iterating, 1, __ATOMIC_SEQ_CST);
        nanosleep(&pause_50us, NULL);
    }
    __atomic_add_fetch(&iterating, 1, __ATOMIC_SEQ_CST);
}

static int iterate(int (*visit)(struct dl_phdr_info *, size_t, void *), void *context) {
    begin_iteration();
    int result = dl_iterate_phdr(visit, context);
    __atomic_sub_fetch(&iterating, 1, __ATOMIC_SEQ_CST);
    return result;
}

static void wait_while(const int *word, int waits) {
    for (int i = 0; i < waits && __atomic_load_n(word, __ATOMIC_SEQ_CST); i++)
        nanosleep(&pause_50us, NULL);
}

static const struct link_map *last_object(void) {
    const struct link_map *last = _r_debug.r_map;
    while (last && last->l_next)
        last = last->l_next;
    return last;
}

/* Objects that were loaded and not seen yet are redirected in the parent, since the child does not look for them. */
void tables_before_fork(void) {
    tables_refresh();
    wait_while(&walking, WALK_WAITS);
    __atomic_add_fetch(&forking, 1, __ATOMIC_SEQ_CST);
    wait_while(&iterating, FORK_WAITS);
    moved_forks();
}

void tables_after_fork(void) {
    __atomic_sub_fetch(&forking, 1, __ATOMIC_SEQ_CST);
}

void tables_forked(void) {
    walking = again = iterating = forking = 0;
    last_inherited = last_object();
}

static int only_inherited(void) {
    if (last_inherited && last_inherited->l_next)
        last_inherited = NULL;
    return last_inherited != NULL;
}

/* ---- all objects ---- */
static int left_alone(const struct dl_phdr_info *info) {
    static const char *const parts[] = {"linux-vdso", "linux-gate", "/ld-linux", "/ld-2.", "/libc.so", "/libc-2.",
                                        "/libpthread", "/libdl.so", "/libdl-2."};
    if (info->dlpi_addr == own_base)
        return 1;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strstr(info->dlpi_name, parts[i]))
            return 1;
    return 0;
}

static struct object *object_of(const struct dl_phdr_info *info) {
    uintptr_t headers = (uintptr_t)info->dlpi_phdr;
    uint32_t name = hash_of(info->dlpi_name ? info->dlpi_name : "");
    for (size_t at = headers >> 6;; at++) {
        struct object *o = &objects[at % OBJECTS];
        if (!o->state) {
            *o = (struct object){info->dlpi_addr, headers, name, NEW, NULL, NULL};
            objects_n++;
            return o;
        }
        if (o->headers == headers && o->base == info->dlpi_addr && o->name == name)
            return o;
    }
}

static int first_pass(struct dl_phdr_info *info, size_t size, void *context) {
    if (objects_n >= OBJECTS - 1)
        return 1;
    seen_adds = info->dlpi_adds;
    seen_subs = info->dlpi_subs;
    struct object *o = object_of(info);
    if (o->state == DONE && o->probe && *o->probe != o->probe_function)
        o->state = NEW;
    return 0;
}

static int second_pass(struct dl_phdr_info *info, size_t size, void *context) {
    struct object *o = objects_n < OBJECTS - 1 ? object_of(info) : NULL;
    unsigned known = *(unsigned *)context;
    if (!o || o->state != NEW)
        return 0;
    if (objects_n > known) { /* came between the passes: next time */
        memset(o, 0, sizeof *o);
        objects_n--;
        return 0;
    }
    if (info->dlpi_name && !left_alone(info))
        redirect(info, o);
    o->state = DONE;
    return 0;
}

static void walk(void) {
    Dl_info ignored;
    if (objects_n > OBJECTS / 2) { /* entries of libraries that were closed long ago */
        memset(objects, 0, sizeof objects);
        objects_n = 0;
    }
    iterate(first_pass, NULL);
    dladdr((void *)&config, &ignored);
    unsigned known = objects_n;
    iterate(second_pass, &known);
    done_adds = seen_adds;
    done_subs = seen_subs;
}

static int changed(struct dl_phdr_info *info, size_t size, void *context) {
    *(int *)context = info->dlpi_adds != done_adds || info->dlpi_subs != done_subs;
    return 1;
}

static int news(void) {
    int news = 0;
    if (!only_inherited())
        iterate(changed, &news);
    return news;
}

/* Another thread walks. It may have begun before our objects came, so ask for one more round, and give it the time: but
 * not for ever, because it may wait for a lock of the loader that our caller holds. */
static void wait_for_walk(void) {
    __atomic_store_n(&again, 1, __ATOMIC_RELEASE);
    wait_while(&walking, WALK_WAITS);
}

void tables_refresh(void) {
    int saved = errno;
    for (int round = 0; round < ROUNDS && news(); round++) {
        if (__atomic_exchange_n(&walking, 1, __ATOMIC_ACQUIRE)) {
            wait_for_walk();
            if (__atomic_load_n(&walking, __ATOMIC_ACQUIRE))
                break;
            continue;
        }
        do {
            __atomic_store_n(&again, 0, __ATOMIC_RELAXED);
            walk();
        } while (__atomic_load_n(&again, __ATOMIC_ACQUIRE));
        __atomic_store_n(&walking, 0, __ATOMIC_RELEASE);
    }
    errno = saved;
}

/* Returns NULL where the original is to answer, which sees the true caller. */
void *hpcstage_dlsym_instead(void *handle, const char *name) {
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT)
        return NULL;
    tables_refresh();
    int found = name ? index_of(name) : -1;
    if (found < 0 || !names[found].original || dlsym(handle, name) != names[found].original)
        return NULL;
    return names[found].hook->function;
}

void tables_info(unsigned *n_objects, unsigned *n_slots) {
    *n_objects = objects_n;
    *n_slots = slots_n;
}

/* ---- this module's own table ---- */
struct range {
    uintptr_t begin, end;
};

static int main_program(struct dl_phdr_info *info, size_t size, void *context) {
    struct range *main = context;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        uintptr_t from = info->dlpi_addr + p->p_vaddr, to = from + p->p_memsz;
        if (p->p_type != PT_LOAD)
            continue;
        main->begin = main->begin && main->begin < from ? main->begin : from;
        main->end = main->end > to ? main->end : to;
    }
    return 1;
}

/* A main program at a fixed address that takes a function's address offers its own stub under that name, and the stub
 * would lead back into our hook: bind to the next definition instead. */
static void mend_slot(const struct slot *slot, const struct tables *t, void *context) {
    const struct range *main = context;
    uintptr_t value = (uintptr_t)*slot->at;
    if (value >= main->begin && value < main->end) {
        void *next = dlsym(RTLD_NEXT, names[slot->name].hook->name);
        if (next && open_sealed(t, PROT_READ | PROT_WRITE) == 0) {
            *slot->at = next;
            open_sealed(t, PROT_READ);
        }
    }
    names[slot->name].original = *slot->at;
}

static int own_headers(struct dl_phdr_info *info, size_t size, void *context) {
    if (info->dlpi_addr != own_base)
        return 0;
    *(struct dl_phdr_info *)context = *info;
    return 1;
}

int tables_install(void) {
    static const struct hook *const all[] = {hooks_open, hooks_stat, hooks_write, hooks_read, hooks_copies, hooks_moves,
                                            hooks_process};
    struct range main = {0};
    struct dl_phdr_info own;
    struct tables t;
    Dl_info self;
    if (!dladdr((void *)&config, &self))
        return -1;
    own_base = (uintptr_t)self.dli_fbase;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (const struct hook *hook = all[i]; hook->name; hook++)
            learn(hook);
    learn(&hook_dlsym);
    learn(&hook_vfork);
    dl_iterate_phdr(main_program, &main);
    if (!dl_iterate_phdr(own_headers, &own) || !read_tables(&own, &t))
        return -1;
    each_slot(&own, &t, mend_slot, &main); /* not inside the iteration: dlsym takes the loader's lock */
    hpcstage_real_dlsym = names[index_of("dlsym")].original;
    if (!hpcstage_real_dlsym)
        return -1;
    tables_refresh();
    return 0;
}
