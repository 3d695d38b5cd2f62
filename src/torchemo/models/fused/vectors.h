/* Vectors of 32 bytes and the register-blocked product that every kernel below is made of.
   REAL is the precision, WORD an integer of its size. */

#define LANES ((long)(32 / sizeof(REAL)))
typedef REAL VEC __attribute__((vector_size(32)));
typedef WORD MASK __attribute__((vector_size(32)));
typedef signed char BYTES __attribute__((vector_size(32 / sizeof(REAL))));

INLINE VEC load(const REAL *from) {
  VEC value;
  memcpy(&value, from, sizeof value);
  return value;
}

INLINE void store(REAL *to, VEC value) { memcpy(to, &value, sizeof value); }

INLINE VEC all(REAL value) { return value - (VEC){0}; }

/* Indices are bytes in memory and words in registers. Compilers unpack and pack them one by one, hence the
   instructions by name where most of the work is. */
INLINE MASK load_index(const signed char *from) {
#ifdef __AVX2__
  if (sizeof(REAL) == 4) return (MASK)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#endif
  BYTES narrow;
  memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, MASK);
}

INLINE void store_index(signed char *to, MASK value) {
#ifdef __AVX2__
  if (sizeof(REAL) == 4) {
    const __m256i all = (__m256i)value;
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packs_epi16(half, half));
    return;
  }
#endif
  const BYTES narrow = __builtin_convertvector(value, BYTES);
  memcpy(to, &narrow, sizeof narrow);
}

INLINE VEC where(MASK mask, VEC yes, VEC no) {
  return (VEC)((mask & (MASK)yes) | (~mask & (MASK)no));
}

INLINE VEC keep(MASK mask, VEC value) { return (VEC)(mask & (MASK)value); }

/* c[i, :] (+)= sum_p a(i, p) b[p, :] for `rows` x `vecs` vectors that stay in registers;
   a(i, p) lies at a[i * a_row + p * a_step], so one kernel serves A B and A^T B. */
INLINE void tile(const int rows, const int vecs, const int add, long depth, const REAL *a,
                 long a_row, long a_step, const REAL *b, long b_row, REAL *c, long c_row) {
  VEC sum[6][2];
  for (int i = 0; i < rows; i++)
    for (int v = 0; v < vecs; v++)
      sum[i][v] = add ? load(c + i * c_row + v * LANES) : (VEC){0};
  for (long p = 0; p < depth; p++) {
    VEC right[2];
    for (int v = 0; v < vecs; v++) right[v] = load(b + p * b_row + v * LANES);
    for (int i = 0; i < rows; i++) {
      const REAL left = a[i * a_row + p * a_step];
      for (int v = 0; v < vecs; v++) sum[i][v] += left * right[v];
    }
  }
  for (int i = 0; i < rows; i++)
    for (int v = 0; v < vecs; v++) store(c + i * c_row + v * LANES, sum[i][v]);
}

/* C = A B with A [rows, depth] and B [depth, cols]; writes rows rounded up to six. */
static void product(long rows, long depth, long cols, const REAL *a, long a_row, const REAL *b,
                    REAL *c) {
  for (long j = 0; j < cols; j += 2 * LANES)
    for (long i = 0; i < rows; i += 6) {
      const REAL *left = a + i * a_row;
      if (j + 2 * LANES <= cols)
        tile(6, 2, 0, depth, left, a_row, 1, b + j, cols, c + i * cols + j, cols);
      else
        tile(6, 1, 0, depth, left, a_row, 1, b + j, cols, c + i * cols + j, cols);
    }
}

/* C += A^T B with A [depth, rows] and B [depth, cols]; rows and cols are multiples of eight. */
static void add_outer(long rows, long depth, long cols, const REAL *a, const REAL *b, REAL *c) {
  for (long j = 0; j < cols; j += 2 * LANES) {
    const int wide = j + 2 * LANES <= cols;
    for (long i = 0; i < rows;) {
      const long left = rows - i;
      const REAL *from = a + i;
      REAL *to = c + i * cols + j;
      if (wide && left >= 6 && left != 8) {
        tile(6, 2, 1, depth, from, 1, rows, b + j, cols, to, cols);
        i += 6;
      } else if (wide) {
        tile(4, 2, 1, depth, from, 1, rows, b + j, cols, to, cols);
        i += 4;
      } else {
        tile(4, 1, 1, depth, from, 1, rows, b + j, cols, to, cols);
        i += 4;
      }
    }
  }
}
