/* The Conv-4 block and its first two derivatives, in the precision that PRECISION says in bits.
   No state and no allocation: callers bring tensors and a workspace, so threads do not meet. */

#include <math.h>
#include <stddef.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#if PRECISION == 32
typedef float REAL;
typedef int WORD;
#else
typedef double REAL;
typedef long long WORD;
#endif

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#include "vectors.h"
#include "winograd.h"
#include "pooling.h"
#include "coefficients.h"
#include "patches.h"
#include "block.h"
#include "first.h"
