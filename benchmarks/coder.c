/*
 * coder: encodes the same stripe of k data blocks into m parities over and over, with nothing around it.
 *
 * Usage: coder METHOD LIBRARY BLOCK_BYTES SECONDS PARITIES M COEFFICIENT...
 *   METHOD    encode  ISA-L's ec_encode_data
 *             table   a table of 256 products for each coefficient, byte by byte: how redset encodes
 *   LIBRARY   the file of ISA-L, opened by dlopen: no header is needed
 *   PARITIES  a file for the parities of the last pass
 * Byte i of data block j is i + i / 256 + 31 j, modulo 256. Prints one line of JSON: the seconds of one pass, the median of
 * batches of a few passes, so that a moment in which another process had the processor does not count.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MOST 256
#define HUGE_PAGE (2 << 20)
#define PASSES_PER_BATCH 4
#define MOST_BATCHES (1 << 20)

typedef unsigned char byte;

static byte *data[MOST], *parities[MOST], *ones[MOST][MOST], coefficients[MOST * MOST], *tables;
static int k, m;
static size_t block;
static void (*init_tables)(int, int, byte *, byte *);
static void (*encode_data)(int, int, int, byte *, byte **, byte **);

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void encode(void)
{
    encode_data((int)block, k, m, tables, data, parities);
}

static void table(void)
{
    for (int i = 0; i < m; i++) {
        memset(parities[i], 0, block);
        for (int j = 0; j < k; j++) {
            const byte *products = ones[i][j], *from = data[j];
            byte *to = parities[i];

            for (size_t b = 0; b < block; b++)
                to[b] ^= products[from[b]];
        }
    }
}

static byte product(int a, int b)
{
    int result = 0;

    for (; b; b >>= 1, a = (a << 1) ^ (a & 0x80 ? 0x11d : 0))
        if (b & 1)
            result ^= a;
    return (byte)result;
}

static void make_tables(void)
{
    for (int i = 0; i < m; i++)
        for (int j = 0; j < k; j++) {
            ones[i][j] = malloc(256);
            for (int value = 0; value < 256; value++)
                ones[i][j][value] = product(coefficients[i * k + j], value);
        }
}

static int load(const char *library)
{
    void *opened = dlopen(library, RTLD_NOW);

    if (!opened)
        return -1;
    *(void **)&init_tables = dlsym(opened, "ec_init_tables");
    *(void **)&encode_data = dlsym(opened, "ec_encode_data");
    if (!init_tables || !encode_data)
        return -1;
    tables = malloc((size_t)(32 * k * m));
    init_tables(k, m, coefficients, tables);
    return 0;
}

static void make_blocks(void)
{
    size_t size = block * (size_t)(k + m);
    byte *memory = aligned_alloc(HUGE_PAGE, (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);

    if (!memory)
        abort();
    madvise(memory, size, MADV_HUGEPAGE);
    memset(memory, 0, size);
    for (int j = 0; j < k; j++) {
        data[j] = memory + block * (size_t)j;
        for (size_t b = 0; b < block; b++)
            data[j][b] = (byte)(b + b / 256 + 31 * (size_t)j);
    }
    for (int i = 0; i < m; i++)
        parities[i] = memory + block * (size_t)(k + i);
}

static int save(const char *path)
{
    FILE *file = fopen(path, "wb");

    if (!file)
        return -1;
    for (int i = 0; i < m; i++)
        if (fwrite(parities[i], 1, block, file) != block)
            return -1;
    return fclose(file);
}

static int ascending(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;

    return (left > right) - (left < right);
}

static double pass_s(void (*work)(void), double limit_s)
{
    double *batches = malloc(sizeof *batches * MOST_BATCHES), start = now_s(), before = start, now;
    int count = 0;

    if (!batches)
        abort();
    do {
        for (int i = 0; i < PASSES_PER_BATCH; i++)
            work();
        now = now_s();
        batches[count++] = now - before;
        before = now;
    } while (now - start < limit_s && count < MOST_BATCHES);
    qsort(batches, (size_t)count, sizeof *batches, ascending);
    return batches[count / 2] / PASSES_PER_BATCH;
}

int main(int argc, char **argv)
{
    double limit_s;
    void (*work)(void);

    if (argc < 8) {
        fprintf(stderr, "usage: coder METHOD LIBRARY BLOCK_BYTES SECONDS PARITIES M COEFFICIENT...\n");
        return 2;
    }
    block = strtoul(argv[3], NULL, 10);
    limit_s = atof(argv[4]);
    m = atoi(argv[6]);
    if (m < 1 || argc - 7 > MOST * MOST || (k = (argc - 7) / m) < 1 || k + m > MOST || !block)
        return 2;
    for (int c = 0; c < k * m; c++)
        coefficients[c] = (byte)atoi(argv[7 + c]);
    work = !strcmp(argv[1], "encode") ? encode : table;
    if (work == table)
        make_tables();
    else if (load(argv[2])) {
        fprintf(stderr, "%s: no ISA-L\n", argv[2]);
        return 1;
    }
    make_blocks();
    work();
    printf("{\"seconds\": %.9f}\n", pass_s(work, limit_s));
    return save(argv[5]) ? 1 : 0;
}
