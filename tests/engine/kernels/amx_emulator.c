/* Intel's AMX in C: a function for each instruction that kernels use (Intel's manual, volume 1, 18, and volume 2).

   A thread has tiles of its own, as it has on the processor. What the processor refuses ends the process with a
   message, and so does what no kernel needs, like a row to start at: the emulator never goes on with less.
 */

#include <immintrin.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_TILES = 8, MAX_ROWS = 16, MAX_ROW_BYTES = 64, ROW_FLOATS = 16, CONFIG_BYTES = 64 };
enum { PALETTE_AT = 0, RESERVED_AT = 1, ROW_BYTES_AT = 16, RESERVED_ROW_BYTES_AT = 32, ROWS_AT = 48, RESERVED_ROWS_AT = 56 };
enum { ROUND_TO_NEAREST_DENORMALS_AS_ZERO = 0x9fc0 }; /* of MXCSR, all exceptions masked */

typedef union {
    uint8_t bytes[MAX_ROW_BYTES];
    uint32_t pairs[ROW_FLOATS]; /* of bfloat16, the first in the lower half */
    float floats[ROW_FLOATS];
    uint32_t words[ROW_FLOATS]; /* int32 that wrap around */
} row;

static _Thread_local uint8_t config[CONFIG_BYTES]; /* palette 0: tiles are not to be used */
static _Thread_local row tiles[NUM_TILES][MAX_ROWS];
static atomic_llong products; /* of all threads */

static void check(int holds, const char *instruction, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "AMX emulator: %s: %s\n", instruction, what);
    abort();
}

static int rows_of(int64_t tile)
{
    return config[ROWS_AT + tile];
}

static int row_bytes_of(int64_t tile)
{
    return config[ROW_BYTES_AT + 2 * tile] | config[ROW_BYTES_AT + 2 * tile + 1] << 8;
}

static int are_zero(const uint8_t *bytes, int first, int end)
{
    while (first < end && bytes[first] == 0)
        first++;
    return first == end;
}

static void check_tile(int64_t tile, const char *instruction)
{
    check(config[PALETTE_AT] != 0, instruction, "no configuration is loaded");
    check(tile >= 0 && tile < NUM_TILES, instruction, "no such tile");
    check(rows_of(tile) > 0, instruction, "the tile is not configured");
}

static void check_config(void)
{
    const char *name = "ldtilecfg";
    check(config[PALETTE_AT] == 1, name, "no such palette");
    check(are_zero(config, RESERVED_AT, ROW_BYTES_AT), name, "a row to start at, or reserved bytes");
    check(are_zero(config, RESERVED_ROW_BYTES_AT, ROWS_AT), name, "reserved bytes after the sizes of rows");
    check(are_zero(config, RESERVED_ROWS_AT, CONFIG_BYTES), name, "reserved bytes after the rows");
    for (int tile = 0; tile < NUM_TILES; tile++) {
        check(rows_of(tile) <= MAX_ROWS, name, "too many rows");
        check(row_bytes_of(tile) <= MAX_ROW_BYTES, name, "rows that are too long");
        check((rows_of(tile) == 0) == (row_bytes_of(tile) == 0), name, "rows of no bytes, or bytes of no rows");
    }
}

void ldtilecfg(const uint8_t *source)
{
    memcpy(config, source, CONFIG_BYTES);
    memset(tiles, 0, sizeof tiles);
    if (config[PALETTE_AT] == 0)
        memset(config, 0, CONFIG_BYTES); /* what else the source has is not looked at */
    else
        check_config();
}

void sttilecfg(uint8_t *target)
{
    memcpy(target, config, CONFIG_BYTES);
}

void tilezero(int64_t tile)
{
    check_tile(tile, "tilezero");
    memset(tiles[tile], 0, sizeof tiles[tile]);
}

void tileloadd64(int64_t tile, const uint8_t *source, int64_t stride)
{
    check_tile(tile, "tileloadd");
    memset(tiles[tile], 0, sizeof tiles[tile]);
    for (int i = 0; i < rows_of(tile); i++)
        memcpy(tiles[tile][i].bytes, source + i * stride, row_bytes_of(tile));
}

void tileloaddt164(int64_t tile, const uint8_t *source, int64_t stride)
{
    tileloadd64(tile, source, stride);
}

void tilestored64(int64_t tile, uint8_t *target, int64_t stride)
{
    check_tile(tile, "tilestored");
    for (int i = 0; i < rows_of(tile); i++)
        memcpy(target + i * stride, tiles[tile][i].bytes, row_bytes_of(tile));
}

static float widened(uint32_t upper_half)
{
    float value;
    memcpy(&value, &upper_half, sizeof value);
    return value;
}

/* Sums of the firsts and of the seconds of all pairs are kept apart to the end, as the manual has it. */
__attribute__((noipa)) static void multiply(int64_t target, int64_t left, int64_t right)
{
    for (int i = 0; i < rows_of(target); i++) {
        float firsts[ROW_FLOATS] = {0}, seconds[ROW_FLOATS] = {0}, sums[ROW_FLOATS];
        for (int k = 0; k < rows_of(right); k++) {
            const uint32_t pair = tiles[left][i].pairs[k], *of_columns = tiles[right][k].pairs;
            const float first = widened(pair << 16), second = widened(pair & 0xffff0000);
            for (int n = 0; n < ROW_FLOATS; n++) {
                firsts[n] = __builtin_fmaf(first, widened(of_columns[n] << 16), firsts[n]);
                seconds[n] = __builtin_fmaf(second, widened(of_columns[n] & 0xffff0000), seconds[n]);
            }
        }
        for (int n = 0; n < ROW_FLOATS; n++)
            sums[n] = tiles[target][i].floats[n] + (firsts[n] + seconds[n]);
        memcpy(tiles[target][i].bytes, sums, row_bytes_of(target));
    }
}

static void check_product(int64_t target, int64_t left, int64_t right, const char *name)
{
    check_tile(target, name);
    check_tile(left, name);
    check_tile(right, name);
    check(target != left && target != right && left != right, name, "a tile is named twice");
    check(rows_of(target) == rows_of(left), name, "the target has other rows than the left tile");
    check(row_bytes_of(target) == row_bytes_of(right), name, "the target has other columns than the right tile");
    check(row_bytes_of(left) == 4 * rows_of(right), name, "the left tile is not as deep as the right one");
    check(row_bytes_of(target) % 4 == 0, name, "a part of a column");
}

void tdpbf16ps(int64_t target, int64_t left, int64_t right)
{
    check_product(target, left, right, "tdpbf16ps");
    const unsigned int before = _mm_getcsr();
    _mm_setcsr(ROUND_TO_NEAREST_DENORMALS_AS_ZERO);
    multiply(target, left, right);
    _mm_setcsr(before);
    atomic_fetch_add_explicit(&products, 1, memory_order_relaxed);
}

/* Unsigned bytes times signed ones. */
void tdpbusd(int64_t target, int64_t left, int64_t right)
{
    check_product(target, left, right, "tdpbusd");
    for (int i = 0; i < rows_of(target); i++) {
        uint32_t sums[ROW_FLOATS];
        memcpy(sums, tiles[target][i].words, sizeof sums);
        for (int k = 0; k < rows_of(right); k++)
            for (int n = 0; n < ROW_FLOATS; n++)
                for (int byte = 0; byte < 4; byte++)
                    sums[n] += (uint32_t)(tiles[left][i].bytes[4 * k + byte] *
                                          (int8_t)tiles[right][k].bytes[4 * n + byte]);
        memcpy(tiles[target][i].bytes, sums, row_bytes_of(target));
    }
    atomic_fetch_add_explicit(&products, 1, memory_order_relaxed);
}

/* How many products there were, for tests that are to make some. */
int64_t num_products(void)
{
    return products;
}
