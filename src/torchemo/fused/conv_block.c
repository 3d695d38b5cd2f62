/* The Conv-4 block and its first two derivatives; every kernel in single and in double precision.
   No state and no allocation: callers bring tensors and a workspace, so threads do not meet. */

#include <math.h>
#include <stddef.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
/* The index of a window where ReLU is off. */
#define NOBODY 4

/* Sums over the lines of a picture of products of a column and a patch: over the columns that every pair of
   kernel taps meets, and over those at the two ends that only some pairs do. */
enum { MIDDLE, BEFORE, BEGIN, LAST, AFTER, PARTS };

/* The next piece of a workspace, on a cache line of its own; without a workspace, only its size is counted. */
static void *carve(void *work, size_t *used, size_t bytes) {
  void *here = work ? (char *)work + *used : NULL;
  *used += (bytes + 63) / 64 * 64;
  return here;
}

#define REAL float
#define WORD int
#define NAME(x) x##_f32
#include "kernels.h"
#undef REAL
#undef WORD
#undef NAME

#define REAL double
#define WORD long long
#define NAME(x) x##_f64
#include "kernels.h"
