/* The byte loops of the codecs. `numpy_kernel.py` is their twin: every function gives equal bytes there.
 *
 * A word is 1, 2, 4 or 8 little-endian bytes, a sign-magnitude float or an integer. A step is rank(new) - rank(old) modulo
 * 2^bits; rank orders floats as integers and is the identity for integers. A steps stream is `gaps` (u8, unchanged words before
 * each change, 255 = add 255 and go on) beside `width` planes of zigzag(step) - 1, one byte of each change per plane.
 *
 * The second half of this file is a template: the first half includes it once for every width, because compilers only vectorise
 * loops well that compute in the type of the word. Every function that Python sees checks all lengths first and works
 * without the GIL.
 */
#ifndef BITS

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older ones refuse, and nothing is lost */
#endif
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the native kernel is for little-endian machines; deltastore uses its NumPy kernel elsewhere"
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

/* One build serves every x86-64 machine: the loader picks the AVX2 clone where there is one. Needs ifunc, hence glibc. */
#if defined(__GNUC__) && defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

enum { PLAIN = 0, ROTATE = 1, ZIGZAG = 2 };
enum { TILE_BYTES = 4096, TILE_CHANGES = 512, MAX_WIDTH = 8, SLACK = 8 };
enum { TOGETHER = 16 }; /* payloads in one call of add_sparse */

typedef struct { size_t gaps, changes; } Counts;

/* Sparse steps as `pack` gives them: `long_count` bytes in each plane of `longs`. */
typedef struct {
    const uint8_t *gaps, *codes, *longs[MAX_WIDTH];
    size_t gap_bytes, count, long_count;
} Packed;

static const uint8_t zeros[TILE_BYTES];

INLINE unsigned lowest_bit(uint64_t mask)
{
#if defined(__GNUC__)
    return (unsigned)__builtin_ctzll(mask);
#else
    unsigned bit = 0;
    while (!(mask >> bit & 1)) bit++;
    return bit;
#endif
}

INLINE unsigned bit_count(uint64_t mask)
{
#if defined(__GNUC__)
    return (unsigned)__builtin_popcountll(mask);
#else
    unsigned count = 0;
    for (; mask; mask &= mask - 1) count++;
    return count;
#endif
}

/* Forbids the compiler to read memory again that it has read before. */
INLINE void forget_memory(const void *kept)
{
#if defined(__GNUC__)
    __asm__ volatile("" : : "r"(kept) : "memory");
#else
    (void)kept;
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* One system call for the pages of a large output that the process has not touched yet, instead of a fault for each. */
INLINE void take_pages(uint8_t *out, size_t size)
{
#if defined(__linux__)
    const size_t page = 4096, ahead = (page - (uintptr_t)out % page) % page;
    if (size >= 64 * page) (void)madvise(out + ahead, (size - ahead) / page * page, MADV_POPULATE_WRITE);
#else
    (void)out;
    (void)size;
#endif
}

/* Positions of the set bits of the masks that `filled` names, at most 64. Writes four at a time, however few there are: a wrong
 * guess of the processor at a loop end costs more than some stores. Hence the slack behind `positions`. */
INLINE size_t set_bits(const uint64_t *masks, uint64_t filled, uint16_t *positions)
{
    const uint64_t guard = 1ull << 63; /* keeps the number of trailing zeros defined for an empty mask */
    size_t count = 0;
    for (; filled; filled &= filled - 1) {
        const unsigned block = lowest_bit(filled);
        uint64_t mask = masks[block];
        uint16_t *out = positions + count;
        count += bit_count(mask);
        do {
            for (unsigned k = 0; k < 4; k++) {
                *out++ = (uint16_t)(64 * block + lowest_bit(mask | guard));
                mask &= mask - 1;
            }
        } while (mask);
    }
    return count;
}

/* True when the gaps name exactly `count` positions, the last one below `length`. */
INLINE int gaps_fit(const uint8_t *gaps, size_t gap_bytes, size_t count, size_t length)
{
    size_t skipped = 0, escapes = 0;
    for (size_t start = 0; start < gap_bytes; start += TILE_BYTES) {
        const size_t end = gap_bytes - start < TILE_BYTES ? gap_bytes : start + TILE_BYTES;
        uint32_t sum = 0, full = 0; /* small sums are what compilers vectorise */
        for (size_t index = start; index < end; index++) {
            sum += gaps[index];
            full += gaps[index] == 255;
        }
        skipped += sum;
        escapes += full;
    }
    return gap_bytes - escapes == count && count <= length && skipped <= length - count &&
           (gap_bytes == 0 || gaps[gap_bytes - 1] != 255);
}

/* The next `wanted` positions, none before `*at`, from the gaps at `*index` on; both move on. False when the gaps end before,
 * or lead to `length` or beyond: after `gaps_fit` only if somebody writes to them meanwhile.
 * An escape writes a position that the next byte overwrites, so that no branch is guessed wrong. */
INLINE int next_positions(const uint8_t *gaps, size_t gap_bytes, size_t *index, size_t *at, size_t length, size_t wanted,
                          uint32_t *positions)
{
    size_t found = 0, next = *at;
    while (found < wanted) {
        const size_t left = gap_bytes - *index, run = left < wanted - found ? left : wanted - found;
        const uint8_t *from = gaps + *index;
        if (run == 0) return 0;
        if (memchr(from, 255, run)) {
            for (size_t k = 0; k < run; k++) {
                const size_t gap = from[k], real = gap != 255;
                positions[found] = (uint32_t)(next + gap);
                next += gap + real;
                found += real;
            }
        } else {
            for (size_t k = 0; k < run; k++) {
                positions[found + k] = (uint32_t)(next + from[k]);
                next += (size_t)from[k] + 1;
            }
            found += run;
        }
        *index += run;
    }
    *at = next;
    return next <= length;
}

/* True when `codes` hold `count` two-bit codes, `long_count` of them 3, and nothing behind them. */
INLINE int codes_fit(const uint8_t *codes, size_t count, size_t long_count)
{
    const size_t bytes = count / 4 + (count % 4 != 0);
    size_t found = 0, index = 0;
    for (; index + 8 <= bytes; index += 8) {
        uint64_t quads;
        memcpy(&quads, codes + index, 8);
        found += bit_count(quads & quads >> 1 & 0x5555555555555555u);
    }
    for (; index < bytes; index++) found += bit_count(codes[index] & codes[index] >> 1 & 0x55u);
    return found == long_count && (count % 4 == 0 || codes[bytes - 1] >> (2 * (count % 4)) == 0);
}

INLINE int packed_fit(const Packed *packed, size_t length)
{
    return gaps_fit(packed->gaps, packed->gap_bytes, packed->count, length) &&
           codes_fit(packed->codes, packed->count, packed->long_count);
}

#define BITS 8
#include "_kernel.c"
#define BITS 16
#include "_kernel.c"
#define BITS 32
#include "_kernel.c"
#define BITS 64
#include "_kernel.c"

typedef struct {
    Counts (*extract)(uint8_t *, const uint8_t *, size_t, uint8_t *, uint8_t *, int);
    int (*apply)(uint8_t *, size_t, const uint8_t *, size_t, const uint8_t *const *, size_t, int);
    void (*add)(uint8_t *, const uint8_t *, size_t, int);
    void (*split)(const uint8_t *, uint8_t *, size_t, int);
    void (*merge)(const uint8_t *const *, uint8_t *, size_t, int);
    size_t (*pack)(const uint8_t *const *, size_t, uint8_t *, uint8_t *);
    int (*apply_packed)(uint8_t *, size_t, const Packed *, int);
} Kernel;

#define KERNEL(bits) \
    {extract_##bits, apply_##bits, add_##bits, split_##bits, merge_##bits, pack_##bits, apply_packed_##bits}
static const Kernel kernels[] = {KERNEL(8), KERNEL(16), KERNEL(32), KERNEL(64)};

/* NULL with a Python error for other widths. */
static const Kernel *kernel_of(unsigned width)
{
    if (width == 1 || width == 2 || width == 4 || width == 8) return &kernels[(width > 1) + (width > 2) + (width > 4)];
    PyErr_Format(PyExc_ValueError, "words are 1, 2, 4 or 8 bytes wide, not %u", width);
    return NULL;
}

/* ---- Python ------------------------------------------------------------------------------------------------------ */

static int check(int fine, const char *message)
{
    if (!fine) PyErr_SetString(PyExc_ValueError, message);
    return fine;
}

/* True when a buffer holds whole words, few enough for positions of 32 bits. */
static int check_target(const Py_buffer *target, unsigned width)
{
    return check(target->len % width == 0, "not a whole number of words") &&
           check((size_t)target->len / width <= UINT32_MAX, "too many words");
}

/* Most bytes that the gaps of `length` words can take, with room for the writer to write ahead. */
static size_t gap_room(size_t length) { return length + length / 255 + 1 + SLACK; }

/* Borrows the buffers of a tuple of `width` planes of equal length; gives that length or -1. */
static Py_ssize_t borrow_planes(PyObject *tuple, unsigned width, Py_buffer *views, const uint8_t **planes)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != (Py_ssize_t)width) {
        PyErr_Format(PyExc_ValueError, "expected a tuple of %u planes", width);
        return -1;
    }
    for (unsigned plane = 0; plane < width; plane++) {
        int failed = PyObject_GetBuffer(PyTuple_GetItem(tuple, plane), &views[plane], PyBUF_SIMPLE);
        if (!failed && views[plane].len != views[0].len) {
            PyErr_SetString(PyExc_ValueError, "planes differ in length");
            PyBuffer_Release(&views[plane]);
            failed = 1;
        }
        if (failed) {
            while (plane--) PyBuffer_Release(&views[plane]);
            return -1;
        }
        planes[plane] = views[plane].buf;
    }
    return views[0].len;
}

static void release_planes(unsigned width, Py_buffer *views)
{
    for (unsigned plane = 0; plane < width; plane++) PyBuffer_Release(&views[plane]);
}

static PyObject *kernel_extract(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer baseline, live, gaps, planes;
    unsigned width;
    int floating;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*y*w*w*Ip:extract", &baseline, &live, &gaps, &planes, &width, &floating)) return NULL;
    const Kernel *kernel = kernel_of(width);
    if (kernel && check(baseline.len == live.len && live.len % width == 0, "baseline and live words differ in length") &&
        check((size_t)gaps.len >= gap_room((size_t)live.len / width) && planes.len >= live.len,
              "output buffers are too small")) {
        Counts done;
        Py_BEGIN_ALLOW_THREADS
        done = kernel->extract(baseline.buf, live.buf, (size_t)live.len / width, gaps.buf, planes.buf, floating);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("nn", (Py_ssize_t)done.gaps, (Py_ssize_t)done.changes);
    }
    PyBuffer_Release(&baseline);
    PyBuffer_Release(&live);
    PyBuffer_Release(&gaps);
    PyBuffer_Release(&planes);
    return result;
}

static PyObject *kernel_collect(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer total, gaps, planes;
    unsigned width;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*w*w*I:collect", &total, &gaps, &planes, &width)) return NULL;
    const Kernel *kernel = kernel_of(width);
    if (kernel && check(total.len % width == 0, "not a whole number of words") &&
        check((size_t)gaps.len >= gap_room((size_t)total.len / width) && planes.len >= total.len,
              "output buffers are too small")) {
        Counts done;
        Py_BEGIN_ALLOW_THREADS
        done = kernel->extract(NULL, total.buf, (size_t)total.len / width, gaps.buf, planes.buf, 0);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("nn", (Py_ssize_t)done.gaps, (Py_ssize_t)done.changes);
    }
    PyBuffer_Release(&total);
    PyBuffer_Release(&gaps);
    PyBuffer_Release(&planes);
    return result;
}

static PyObject *kernel_apply(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer target, gaps, views[MAX_WIDTH];
    const uint8_t *planes[MAX_WIDTH];
    PyObject *tuple, *result = NULL;
    unsigned width;
    int floating;
    if (!PyArg_ParseTuple(args, "w*y*OIp:apply", &target, &gaps, &tuple, &width, &floating)) return NULL;
    const Kernel *kernel = kernel_of(width);
    if (kernel && check_target(&target, width)) {
        Py_ssize_t count = borrow_planes(tuple, width, views, planes);
        if (count >= 0) {
            int fits;
            Py_BEGIN_ALLOW_THREADS
            fits = kernel->apply(target.buf, (size_t)target.len / width, gaps.buf, (size_t)gaps.len, planes, (size_t)count,
                                 floating);
            Py_END_ALLOW_THREADS
            result = PyBool_FromLong(fits);
            release_planes(width, views);
        }
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&gaps);
    return result;
}

static PyObject *kernel_add(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer target, steps;
    unsigned width;
    int floating;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "w*y*Ip:add", &target, &steps, &width, &floating)) return NULL;
    const Kernel *kernel = kernel_of(width);
    if (kernel && check(target.len == steps.len && steps.len % width == 0, "target and steps differ in length")) {
        Py_BEGIN_ALLOW_THREADS
        kernel->add(target.buf, steps.buf, (size_t)steps.len / width, floating);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&steps);
    return result;
}

static PyObject *kernel_split(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer words, planes;
    unsigned width;
    int transform;
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "y*w*Ii:split", &words, &planes, &width, &transform)) return NULL;
    const Kernel *kernel = kernel_of(width);
    if (kernel && check(transform >= PLAIN && transform <= ZIGZAG, "unknown transform") &&
        check(words.len == planes.len && words.len % width == 0, "words and planes differ in length")) {
        Py_BEGIN_ALLOW_THREADS
        kernel->split(words.buf, planes.buf, (size_t)words.len / width, transform);
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&words);
    PyBuffer_Release(&planes);
    return result;
}

static PyObject *kernel_merge(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer words, views[MAX_WIDTH];
    const uint8_t *planes[MAX_WIDTH];
    PyObject *tuple, *result = NULL;
    unsigned width;
    int transform;
    if (!PyArg_ParseTuple(args, "Ow*Ii:merge", &tuple, &words, &width, &transform)) return NULL;
    const Kernel *kernel = kernel_of(width);
    if (kernel && check(transform >= PLAIN && transform <= ZIGZAG, "unknown transform")) {
        Py_ssize_t length = borrow_planes(tuple, width, views, planes);
        if (length >= 0) {
            if (check(words.len % width == 0 && words.len / width == length, "words and planes differ in length")) {
                Py_BEGIN_ALLOW_THREADS
                take_pages(words.buf, (size_t)words.len);
                kernel->merge(planes, words.buf, (size_t)length, transform);
                Py_END_ALLOW_THREADS
                result = Py_NewRef(Py_None);
            }
            release_planes(width, views);
        }
    }
    PyBuffer_Release(&words);
    return result;
}

static PyObject *kernel_pack(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer codes, longs, views[MAX_WIDTH];
    const uint8_t *planes[MAX_WIDTH];
    PyObject *tuple, *result = NULL;
    unsigned width;
    if (!PyArg_ParseTuple(args, "Ow*w*I:pack", &tuple, &codes, &longs, &width)) return NULL;
    const Kernel *kernel = kernel_of(width);
    if (kernel) {
        Py_ssize_t count = borrow_planes(tuple, width, views, planes);
        if (count >= 0) {
            if (check(codes.len >= count / 4 + (count % 4 != 0) && longs.len / width >= count,
                      "output buffers are too small")) {
                size_t escaped;
                Py_BEGIN_ALLOW_THREADS
                escaped = kernel->pack(planes, (size_t)count, codes.buf, longs.buf);
                Py_END_ALLOW_THREADS
                result = PyLong_FromSize_t(escaped);
            }
            release_planes(width, views);
        }
    }
    PyBuffer_Release(&codes);
    PyBuffer_Release(&longs);
    return result;
}

static PyObject *kernel_apply_packed(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer target, gaps, codes, views[MAX_WIDTH];
    Packed packed;
    PyObject *tuple, *result = NULL;
    Py_ssize_t count;
    unsigned width;
    int floating;
    if (!PyArg_ParseTuple(args, "w*y*y*OnIp:apply_packed", &target, &gaps, &codes, &tuple, &count, &width, &floating))
        return NULL;
    const Kernel *kernel = kernel_of(width);
    if (kernel && check_target(&target, width) &&
        check(count >= 0 && codes.len == count / 4 + (count % 4 != 0), "codes and count differ in length")) {
        Py_ssize_t long_count = borrow_planes(tuple, width, views, packed.longs);
        if (long_count >= 0) {
            int fits;
            packed.gaps = gaps.buf;
            packed.codes = codes.buf;
            packed.gap_bytes = (size_t)gaps.len;
            packed.count = (size_t)count;
            packed.long_count = (size_t)long_count;
            Py_BEGIN_ALLOW_THREADS
            fits = packed_fit(&packed, (size_t)target.len / width) &&
                   kernel->apply_packed(target.buf, (size_t)target.len / width, &packed, floating);
            Py_END_ALLOW_THREADS
            result = PyBool_FromLong(fits);
            release_planes(width, views);
        }
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&gaps);
    PyBuffer_Release(&codes);
    return result;
}

/* ---- whole payloads of sparse-ulp@1; the format stands in delta.py and streams.py, where damage is named ------------ */

enum { MODE_ZERO = 0, MODE_RAW = 1, MODE_ZSTD = 2 };

typedef struct {
    Py_buffer payload;
    PyObject *raw[2 + MAX_WIDTH]; /* what was made of streams that are not raw */
    Packed packed;
} Sparse;

static int read_number(const uint8_t **at, const uint8_t *end, uint64_t limit, size_t *number)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 63 && *at < end; shift += 7) {
        const uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *number = (size_t)value;
            return value <= limit;
        }
    }
    return 0;
}

/* The window descriptor of the frame of a stream: see `_frame_start` in streams.py. */
static uint8_t window_of(size_t length)
{
    unsigned log = 10;
    while (log < 20 && (size_t)1 << log < length) log++;
    return (uint8_t)((log - 10) << 3);
}

/* The `length` bytes of a stream of `stored` bytes at `body`; `*made` holds them where they had to be made. NULL when it is
 * damaged. */
static const uint8_t *open_stream(const uint8_t *body, size_t head, size_t length, PyObject *decompress, PyObject **made)
{
    const size_t mode = head & 3, stored = head >> 2;
    if (mode == MODE_RAW && stored == length) return body;
    if (mode == MODE_ZERO && stored == 0) {
        *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
        if (*made) memset(PyBytes_AsString(*made), 0, length);
    } else if (mode == MODE_ZSTD && stored > 2 && stored < length && body[0] == 0 && body[1] == window_of(length)) {
        PyObject *frame = PyMemoryView_FromMemory((char *)body, (Py_ssize_t)stored, PyBUF_READ);
        if (frame) *made = PyObject_CallFunction(decompress, "OnOO", frame, (Py_ssize_t)length, Py_False, Py_False);
        Py_XDECREF(frame);
    }
    if (!*made || !PyBytes_Check(*made) || PyBytes_Size(*made) != (Py_ssize_t)length) return NULL;
    return (const uint8_t *)PyBytes_AsString(*made);
}

static int open_sparse(Sparse *sparse, unsigned code, size_t length, PyObject *decompress)
{
    const unsigned width = 1u << (code & 3);
    const uint8_t *at = sparse->payload.buf, *end = at + sparse->payload.len;
    Packed *packed = &sparse->packed;
    size_t heads[2 + MAX_WIDTH], lengths[2 + MAX_WIDTH], stored = 0;
    const uint8_t *streams[2 + MAX_WIDTH];
    if (at == end || *at++ != code) return 0;
    if (!read_number(&at, end, length, &packed->count)) return 0;
    if (!read_number(&at, end, packed->count + length / 255, &packed->gap_bytes)) return 0;
    if (!read_number(&at, end, packed->count, &packed->long_count)) return 0;
    lengths[0] = packed->gap_bytes;
    lengths[1] = packed->count / 4 + (packed->count % 4 != 0);
    for (unsigned plane = 0; plane < width; plane++) lengths[2 + plane] = packed->long_count;
    for (unsigned stream = 0; stream < 2 + width; stream++) {
        if (!read_number(&at, end, (uint64_t)lengths[stream] << 2 | 3, &heads[stream])) return 0;
        stored += heads[stream] >> 2;
    }
    if (stored != (size_t)(end - at)) return 0;
    for (unsigned stream = 0; stream < 2 + width; stream++) {
        streams[stream] = open_stream(at, heads[stream], lengths[stream], decompress, &sparse->raw[stream]);
        if (!streams[stream]) return 0;
        at += heads[stream] >> 2;
    }
    packed->gaps = streams[0];
    packed->codes = streams[1];
    for (unsigned plane = 0; plane < width; plane++) packed->longs[plane] = streams[2 + plane];
    return 1;
}

static PyObject *kernel_add_sparse(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer target;
    Sparse opened[TOGETHER];
    PyObject *tuple, *decompress, *result = NULL;
    unsigned code;
    int floating, fits = 1;
    Py_ssize_t count = 0;
    if (!PyArg_ParseTuple(args, "w*O!OIp:add_sparse", &target, &PyTuple_Type, &tuple, &decompress, &code, &floating)) return NULL;
    const Py_ssize_t wanted = PyTuple_Size(tuple);
    if (check(code < 8, "unknown word code") && check_target(&target, 1u << (code & 3)) &&
        check(wanted <= TOGETHER, "too many payloads at once")) {
        const unsigned width = 1u << (code & 3);
        const size_t length = (size_t)target.len / width;
        for (; fits && count < wanted; count++) {
            memset(&opened[count], 0, sizeof opened[count]);
            if (PyObject_GetBuffer(PyTuple_GetItem(tuple, count), &opened[count].payload, PyBUF_SIMPLE)) break;
            fits = open_sparse(&opened[count], code, length, decompress);
        }
        if (!fits && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
        if (fits && count == wanted) {
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t k = 0; fits && k < count; k++) fits = packed_fit(&opened[k].packed, length);
            for (Py_ssize_t k = 0; fits && k < count; k++)
                fits = kernel_of(width)->apply_packed(target.buf, length, &opened[k].packed, floating);
            Py_END_ALLOW_THREADS
        }
        if (!PyErr_Occurred()) result = PyBool_FromLong(fits);
        while (count--) {
            for (unsigned stream = 0; stream < 2 + MAX_WIDTH; stream++) Py_XDECREF(opened[count].raw[stream]);
            PyBuffer_Release(&opened[count].payload);
        }
    }
    PyBuffer_Release(&target);
    return result;
}

static PyMethodDef methods[] = {
    {"extract", kernel_extract, METH_VARARGS, "extract(baseline, live, gaps, planes, width, floating) -> (gap bytes, changes)"},
    {"collect", kernel_collect, METH_VARARGS, "collect(total, gaps, planes, width) -> (gap bytes, changes)"},
    {"apply", kernel_apply, METH_VARARGS, "apply(target, gaps, planes, width, floating) -> whether the steps fit"},
    {"add", kernel_add, METH_VARARGS, "add(target, steps, width, floating)"},
    {"split", kernel_split, METH_VARARGS, "split(words, planes, width, transform)"},
    {"merge", kernel_merge, METH_VARARGS, "merge(planes, words, width, transform)"},
    {"pack", kernel_pack, METH_VARARGS, "pack(planes, codes, longs, width) -> long steps"},
    {"apply_packed", kernel_apply_packed, METH_VARARGS,
     "apply_packed(target, gaps, codes, longs, count, width, floating) -> whether the steps fit"},
    {"add_sparse", kernel_add_sparse, METH_VARARGS,
     "add_sparse(target, payloads, decompress, code, floating) -> whether all payloads could be read and fit"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "Byte loops of the codecs.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }

#else /* ---- the template, for words of BITS bits ------------------------------------------------------------------- */

#define JOIN_(name, bits) name##_##bits
#define JOIN(name, bits) JOIN_(name, bits)
#define N(name) JOIN(name, BITS)
#define WIDTH (BITS / 8)
#define TILE_WORDS (TILE_BYTES / WIDTH)
#if BITS == 8
#define WORD uint8_t
#elif BITS == 16
#define WORD uint16_t
#elif BITS == 32
#define WORD uint32_t
#else
#define WORD uint64_t
#endif
#define SIGN ((WORD)((WORD)1 << (BITS - 1)))

INLINE WORD N(load)(const uint8_t *words, size_t index)
{
    WORD word;
    memcpy(&word, words + WIDTH * index, WIDTH);
    return word;
}

INLINE void N(store)(uint8_t *words, size_t index, WORD word) { memcpy(words + WIDTH * index, &word, WIDTH); }

/* All ones when the highest bit is set, else zero. */
INLINE WORD N(spread)(WORD word) { return (WORD)(0 - (WORD)(word >> (BITS - 1))); }

/* Negative floats count downwards from the sign, positive ones upwards. */
INLINE WORD N(rank)(WORD word, int floating) { return floating ? (WORD)(word ^ (WORD)(SIGN | N(spread)(word))) : word; }

INLINE WORD N(word)(WORD rank, int floating) { return floating ? (WORD)(rank ^ (WORD)(SIGN | N(spread)((WORD)~rank))) : rank; }

INLINE WORD N(zigzag)(WORD step) { return (WORD)((WORD)(step << 1) ^ N(spread)(step)); }

INLINE WORD N(unzigzag)(WORD code) { return (WORD)((WORD)(code >> 1) ^ (WORD)(0 - (WORD)(code & 1))); }

/* ROTATE moves the sign below the eight bits after it, so that the exponent of bf16 and fp32 fills the highest byte. */
INLINE WORD N(transformed)(WORD word, int transform)
{
    if (transform == ZIGZAG) return N(zigzag)(word);
#if BITS == 8
    if (transform == ROTATE) return (WORD)((WORD)(word << 1) | (WORD)(word >> 7));
#else
    const WORD top = (WORD)((WORD)255 << (BITS - 8)), low = (WORD)(((WORD)1 << (BITS - 9)) - 1);
    if (transform == ROTATE)
        return (WORD)((WORD)((WORD)(word << 1) & top) | (WORD)((WORD)(word >> 8) & (WORD)(low + 1)) | (WORD)(word & low));
#endif
    return word;
}

INLINE WORD N(restored)(WORD word, int transform)
{
    if (transform == ZIGZAG) return N(unzigzag)(word);
#if BITS == 8
    if (transform == ROTATE) return (WORD)((WORD)(word >> 1) | (WORD)(word << 7));
#else
    const WORD top = (WORD)((WORD)255 << (BITS - 8)), low = (WORD)(((WORD)1 << (BITS - 9)) - 1);
    if (transform == ROTATE)
        return (WORD)((WORD)((WORD)(word & top) >> 1) | (WORD)((WORD)(word & (WORD)(low + 1)) << 8) | (WORD)(word & low));
#endif
    return word;
}

/* One bit for each of 64 words: set where `old` and `new` differ. */
INLINE uint64_t N(changed)(const uint8_t *old, const uint8_t *new)
{
    uint64_t mask = 0;
#if defined(__SSE2__) && BITS < 64
    for (unsigned group = 0; group < 4; group++) { /* 16 words in each */
        __m128i equal[WIDTH];
        for (unsigned lane = 0; lane < WIDTH; lane++) {
            const size_t at = 16 * (WIDTH * group + lane);
            const __m128i x = _mm_loadu_si128((const __m128i *)(old + at)), y = _mm_loadu_si128((const __m128i *)(new + at));
#if BITS == 8
            equal[lane] = _mm_cmpeq_epi8(x, y);
#elif BITS == 16
            equal[lane] = _mm_cmpeq_epi16(x, y);
#else
            equal[lane] = _mm_cmpeq_epi32(x, y);
#endif
        }
#if BITS == 32
        equal[0] = _mm_packs_epi32(equal[0], equal[1]);
        equal[1] = _mm_packs_epi32(equal[2], equal[3]);
#endif
#if BITS > 8
        equal[0] = _mm_packs_epi16(equal[0], equal[1]);
#endif
        mask |= (uint64_t)(uint16_t)~_mm_movemask_epi8(equal[0]) << (16 * group);
    }
#else
    uint8_t differs[64];
    for (unsigned index = 0; index < 64; index++) differs[index] = N(load)(old, index) != N(load)(new, index);
    for (unsigned group = 0; group < 8; group++) { /* gathers the lowest bits of 8 bytes in one byte */
        uint64_t bytes;
        memcpy(&bytes, differs + 8 * group, 8);
        mask |= (bytes * 0x0102040810204080ull >> 56) << (8 * group);
    }
#endif
    return mask;
}

/* Positions of the words of a tile that differ. */
INLINE size_t N(changed_positions)(const uint8_t *old, const uint8_t *new, size_t length, uint16_t *positions)
{
    uint64_t masks[TILE_WORDS / 64], filled = 0;
    size_t blocks = length / 64;
    for (size_t block = 0; block < blocks; block++) {
        masks[block] = N(changed)(old + 64 * WIDTH * block, new + 64 * WIDTH * block);
        filled |= (uint64_t)(masks[block] != 0) << block;
    }
    if (length % 64) {
        masks[blocks] = 0;
        for (size_t index = 64 * blocks; index < length; index++)
            masks[blocks] |= (uint64_t)(N(load)(old, index) != N(load)(new, index)) << (index % 64);
        filled |= (uint64_t)(masks[blocks] != 0) << blocks;
    }
    return set_bits(masks, filled, positions);
}

/* Gaps before the `found` > 0 changes of a tile, the first of them `first` words behind the last change. Gives their number. */
INLINE size_t N(write_gaps)(const uint16_t *positions, size_t found, size_t first, uint8_t *gaps)
{
    size_t written = first / 255;
    unsigned widest = 0;
    memset(gaps, 255, SLACK); /* all that most gaps need, without a loop */
    if (written > SLACK) memset(gaps, 255, written);
    gaps[written++] = (uint8_t)(first % 255);
    for (size_t k = 1; k < found; k++) {
        const unsigned gap = (unsigned)(positions[k] - positions[k - 1]) - 1;
        widest = gap > widest ? gap : widest;
    }
    if (widest < 255) {
        for (size_t k = 1; k < found; k++) gaps[written + k - 1] = (uint8_t)(positions[k] - positions[k - 1] - 1);
        return written + found - 1;
    }
    for (size_t k = 1; k < found; k++) {
        const unsigned gap = (unsigned)(positions[k] - positions[k - 1]) - 1, escapes = gap / 255;
        memset(gaps + written, 255, SLACK);
        if (escapes > SLACK) memset(gaps + written, 255, escapes);
        written += escapes;
        gaps[written++] = (uint8_t)(gap - 255 * escapes);
    }
    return written;
}

/* With a baseline: the steps from it to `live`, which it takes over. Without: the nonzero integers of `live`.
 * Another thread may write to `live` meanwhile. So each tile of it is copied once, the compiler may not look there
 * again, and everything else comes from the copy. The loops over the changes of a tile do one thing each, because that is
 * what compilers vectorise. */
INLINE Counts N(extract_steps)(uint8_t *baseline, const uint8_t *live, size_t length, uint8_t *gaps, uint8_t *planes,
                               int floating)
{
    uint8_t copy[TILE_BYTES];
    uint16_t positions[TILE_WORDS + SLACK];
    WORD before[TILE_WORDS], after[TILE_WORDS];
    size_t next = 0;
    Counts done = {0, 0};
    for (size_t start = 0; start < length; start += TILE_WORDS) {
        const size_t words = length - start < TILE_WORDS ? length - start : TILE_WORDS;
        uint8_t *old = baseline ? baseline + WIDTH * start : NULL;
        const uint8_t *tile = live + WIDTH * start;
        if (baseline) {
            memcpy(copy, tile, WIDTH * words);
            forget_memory(copy);
            tile = copy;
        }
        const size_t found = N(changed_positions)(baseline ? old : zeros, tile, words, positions);
        if (found == 0) continue;
        for (size_t k = 0; k < found; k++) {
            after[k] = N(load)(tile, positions[k]);
            if (!baseline) continue;
            before[k] = N(load)(old, positions[k]);
            N(store)(old, positions[k], after[k]);
        }
        for (size_t k = 0; k < found; k++) {
            const WORD step = baseline ? (WORD)(N(rank)(after[k], floating) - N(rank)(before[k], floating)) : after[k];
            after[k] = (WORD)(N(zigzag)(step) - 1);
        }
        for (unsigned plane = 0; plane < WIDTH; plane++) {
            uint8_t *out = planes + plane * length + done.changes;
            for (size_t k = 0; k < found; k++) out[k] = (uint8_t)(after[k] >> (8 * plane));
        }
        done.gaps += N(write_gaps)(positions, found, start + positions[0] - next, gaps + done.gaps);
        done.changes += found;
        next = start + positions[found - 1] + 1;
    }
    return done;
}

CLONES static Counts N(extract)(uint8_t *baseline, const uint8_t *live, size_t length, uint8_t *gaps, uint8_t *planes,
                                int floating)
{
    if (!baseline) return N(extract_steps)(NULL, live, length, gaps, planes, 0);
    if (floating) return N(extract_steps)(baseline, live, length, gaps, planes, 1);
    return N(extract_steps)(baseline, live, length, gaps, planes, 0);
}

/* Adds steps to the words at some different positions. Reading all before writing any lets the memory work ahead. */
INLINE void N(add_at)(uint8_t *target, const uint32_t *positions, const WORD *steps, size_t count, int floating)
{
    WORD words[TILE_CHANGES];
    for (size_t k = 0; k < count; k++) words[k] = N(load)(target, positions[k]);
    for (size_t k = 0; k < count; k++) words[k] = N(word)((WORD)(N(rank)(words[k], floating) + steps[k]), floating);
    for (size_t k = 0; k < count; k++) N(store)(target, positions[k], words[k]);
}

INLINE int N(apply_steps)(uint8_t *target, size_t length, const uint8_t *gaps, size_t gap_bytes, const uint8_t *const *planes,
                          size_t count, int floating)
{
    size_t index = 0, at = 0;
    uint32_t positions[TILE_CHANGES];
    WORD steps[TILE_CHANGES];
    if (!gaps_fit(gaps, gap_bytes, count, length)) return 0;
    for (size_t first = 0; first < count; first += TILE_CHANGES) {
        const size_t changes = count - first < TILE_CHANGES ? count - first : TILE_CHANGES;
        if (!next_positions(gaps, gap_bytes, &index, &at, length, changes, positions)) return 0;
        for (size_t k = 0; k < changes; k++) {
            WORD code = 0;
            for (unsigned plane = 0; plane < WIDTH; plane++) code |= (WORD)((WORD)planes[plane][first + k] << (8 * plane));
            steps[k] = N(unzigzag)((WORD)(code + 1));
        }
        N(add_at)(target, positions, steps, changes, floating);
    }
    return 1;
}

CLONES static int N(apply)(uint8_t *target, size_t length, const uint8_t *gaps, size_t gap_bytes, const uint8_t *const *planes,
                           size_t count, int floating)
{
    if (floating) return N(apply_steps)(target, length, gaps, gap_bytes, planes, count, 1);
    return N(apply_steps)(target, length, gaps, gap_bytes, planes, count, 0);
}

/* Adds packed steps that `packed_fit` has checked. False when they don't fit: only if somebody writes there meanwhile. */
INLINE int N(apply_packed_steps)(uint8_t *target, size_t length, const Packed *packed, int floating)
{
    const size_t count = packed->count;
    size_t index = 0, at = 0, escaped = 0;
    uint32_t positions[TILE_CHANGES];
    WORD steps[TILE_CHANGES], quads[256][4];
    for (unsigned quad = 0; quad < 256; quad++)
        for (unsigned k = 0; k < 4; k++) quads[quad][k] = N(unzigzag)((WORD)((quad >> (2 * k) & 3) + 1));
    for (size_t first = 0; first < count; first += TILE_CHANGES) {
        const size_t changes = count - first < TILE_CHANGES ? count - first : TILE_CHANGES;
        uint8_t tile[TILE_CHANGES / 4] = {0};
        uint16_t bits[TILE_CHANGES + SLACK];
        uint64_t masks[TILE_CHANGES / 32], filled = 0;
        if (!next_positions(packed->gaps, packed->gap_bytes, &index, &at, length, changes, positions)) return 0;
        memcpy(tile, packed->codes + first / 4, (changes + 3) / 4);
        for (size_t quad = 0; quad < (changes + 3) / 4; quad++) memcpy(steps + 4 * quad, quads[tile[quad]], 4 * WIDTH);
        for (unsigned group = 0; group < TILE_CHANGES / 32; group++) {
            memcpy(&masks[group], tile + 8 * group, 8);
            masks[group] &= masks[group] >> 1 & 0x5555555555555555u; /* bit 2 k: change k of the group has code 3 */
            filled |= (uint64_t)(masks[group] != 0) << group;
        }
        const size_t found = set_bits(masks, filled, bits);
        if (found > packed->long_count - escaped) return 0;
        for (size_t k = 0; k < found; k++) {
            WORD code = 0;
            for (unsigned plane = 0; plane < WIDTH; plane++)
                code |= (WORD)((WORD)packed->longs[plane][escaped + k] << (8 * plane));
            steps[bits[k] / 2] = N(unzigzag)((WORD)(code + 1));
        }
        escaped += found;
        N(add_at)(target, positions, steps, changes, floating);
    }
    return 1;
}

CLONES static int N(apply_packed)(uint8_t *target, size_t length, const Packed *packed, int floating)
{
    if (floating) return N(apply_packed_steps)(target, length, packed, 1);
    return N(apply_packed_steps)(target, length, packed, 0);
}

INLINE void N(add_steps)(uint8_t *restrict target, const uint8_t *restrict steps, size_t length, int floating)
{
    for (size_t index = 0; index < length; index++) {
        const WORD rank = (WORD)(N(rank)(N(load)(target, index), floating) + N(load)(steps, index));
        N(store)(target, index, N(word)(rank, floating));
    }
}

CLONES static void N(add)(uint8_t *target, const uint8_t *steps, size_t length, int floating)
{
    if (floating) N(add_steps)(target, steps, length, 1);
    else N(add_steps)(target, steps, length, 0);
}

/* One plane after the other over a tile that stays in the cache: loops with one output are what compilers vectorise. */
INLINE void N(split_words)(const uint8_t *restrict words, uint8_t *restrict planes, size_t length, int transform)
{
    for (size_t start = 0; start < length; start += TILE_WORDS) {
        const size_t end = length - start < TILE_WORDS ? length : start + TILE_WORDS;
        for (unsigned plane = 0; plane < WIDTH; plane++)
            for (size_t index = start; index < end; index++)
                planes[plane * length + index] = (uint8_t)(N(transformed)(N(load)(words, index), transform) >> (8 * plane));
    }
}

CLONES static void N(split)(const uint8_t *words, uint8_t *planes, size_t length, int transform)
{
    if (transform == ROTATE) N(split_words)(words, planes, length, ROTATE);
    else if (transform == ZIGZAG) N(split_words)(words, planes, length, ZIGZAG);
    else N(split_words)(words, planes, length, PLAIN);
}

INLINE void N(merge_words)(const uint8_t *const *planes, uint8_t *restrict words, size_t length, int transform)
{
    const uint8_t *restrict plane[WIDTH];
    for (unsigned k = 0; k < WIDTH; k++) plane[k] = planes[k];
    for (size_t index = 0; index < length; index++) {
        WORD word = 0;
        for (unsigned k = 0; k < WIDTH; k++) word |= (WORD)((WORD)plane[k][index] << (8 * k));
        N(store)(words, index, N(restored)(word, transform));
    }
}

CLONES static void N(merge)(const uint8_t *const *planes, uint8_t *words, size_t length, int transform)
{
    if (transform == ROTATE) N(merge_words)(planes, words, length, ROTATE);
    else if (transform == ZIGZAG) N(merge_words)(planes, words, length, ZIGZAG);
    else N(merge_words)(planes, words, length, PLAIN);
}

/* zigzag(step) - 1 of 0, 1 or 2 is a two-bit code, four to a byte, first change lowest; code 3 sends all bytes of the
 * change to the long planes. `longs` has `count` bytes of room per plane. */
CLONES static size_t N(pack)(const uint8_t *const *planes, size_t count, uint8_t *codes, uint8_t *longs)
{
    uint16_t positions[TILE_CHANGES + SLACK];
    size_t escaped = 0;
    for (size_t first = 0; first < count; first += TILE_CHANGES) {
        const size_t changes = count - first < TILE_CHANGES ? count - first : TILE_CHANGES;
        uint8_t tile[TILE_CHANGES] = {0}, is_long[TILE_CHANGES];
        for (size_t k = 0; k < changes; k++) {
            const uint8_t low = planes[0][first + k];
            uint8_t high = 0;
            for (unsigned plane = 1; plane < WIDTH; plane++) high |= planes[plane][first + k];
            tile[k] = (low < 3) & (high == 0) ? low : 3;
            is_long[k] = tile[k] == 3;
        }
        for (size_t quad = 0; quad < (changes + 3) / 4; quad++) {
            uint32_t four;
            memcpy(&four, tile + 4 * quad, 4);
            codes[first / 4 + quad] = (uint8_t)(four * 0x01041040u >> 24); /* moves byte k to bit 24 + 2 k */
        }
        const size_t found = changed_positions_8(zeros, is_long, changes, positions);
        for (unsigned plane = 0; plane < WIDTH; plane++)
            for (size_t k = 0; k < found; k++) longs[plane * count + escaped + k] = planes[plane][first + positions[k]];
        escaped += found;
    }
    return escaped;
}

#undef JOIN_
#undef JOIN
#undef N
#undef WIDTH
#undef TILE_WORDS
#undef WORD
#undef SIGN
#undef BITS
#endif
