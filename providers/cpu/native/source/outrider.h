/* What every kernel of the compiled library is written against.
 *
 * A kernel is `void f(const void *args, int64_t task, int64_t thread)`: it does share `task` of the work that `args`
 * describes. `args` points to a struct whose fields are all 8 bytes wide (pointers, int64_t, double), filled by
 * `Library.call` in Python in the same order; KERNEL tells Python how many there are. Tasks of one call run at once on
 * the threads of the pool, each exactly once; they write to different places and share nothing else. `thread` (0 ..
 * threads - 1) says whose scratch memory to use. A kernel cannot fail: whatever could be wrong is checked in Python.
 *
 * The bits of a result must not depend on the number of threads: never split a sum between tasks.
 */
#ifndef OUTRIDER_H
#define OUTRIDER_H

#include <math.h>
#include <stdint.h>
#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Declares kernel `name` whose args are `struct name`, and exports the number of its words for Python to check. */
#define KERNEL(name) \
    EXPORT const int64_t name##_words = sizeof(struct name) / 8; \
    EXPORT void name(const void *args_, int64_t task, int64_t thread)

/* The first line of a kernel. */
#define ARGS(name) const struct name *a = args_; (void)task; (void)thread

/* Eight floats, in one AVX register or in two of NEON. Loads and stores need no alignment. */
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8v __attribute__((vector_size(32)));
typedef uint32_t u8v __attribute__((vector_size(32)));

INLINE v8 load8(const float *p) { v8 v; memcpy(&v, p, sizeof v); return v; }
INLINE void store8(float *p, v8 v) { memcpy(p, &v, sizeof v); }
INLINE v8 all8(float x) { return (v8){x, x, x, x, x, x, x, x}; }

/* The first n < 8 of eight floats; the others are 0 and are not touched in memory. */
INLINE v8 load8n(const float *p, int64_t n) { v8 v = all8(0); memcpy(&v, p, 4 * (size_t)n); return v; }
INLINE void store8n(float *p, v8 v, int64_t n) { memcpy(p, &v, 4 * (size_t)n); }

/* Share `task` of `tasks` of n items: from *first up to and without *last. */
INLINE void share(int64_t n, int64_t task, int64_t tasks, int64_t *first, int64_t *last)
{
    *first = n * task / tasks;
    *last = n * (task + 1) / tasks;
}

#endif
