/* Pictures as rows of 3x3 patches, for a first layer that needs no gradient in its input.

   A line of a picture is expanded to columns of 3 x channels elements (three lines of it), one column after the
   other, so that the patch at position j is the run of 3 columns that begins at column j, element (kx, ky, c).
   From all values a constant per channel is subtracted, also from the zeros around the picture: it moves y by a
   constant, which normalisation removes, and keeps the sums of squares below free of cancellation.

   What the dense part of the derivative needs of the pictures is small: the sum of all patches and their
   centred Gram matrix, sum_p (p - mean)(p - mean)^T, which do not depend on the weights. */

typedef struct {
  long height, width, channels;
  long column, patch;   /* elements of a column and of a patch */
  long padded;          /* a patch in whole vectors, an even number of them */
  long row;             /* elements reserved for an expanded line */
} PICTURE;

INLINE PICTURE picture_of(long height, long width, long channels) {
  const long column = 3 * channels, patch = 3 * column;
  const long padded = (patch + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
  return (PICTURE){height, width, channels, column, patch, padded, (width + 8) * column + padded};
}

/* Interleave 3 x channels lines, less their levels, into the inside columns of `row`. */
INLINE void interleave(const int channels, long width, const REAL *const *lines, const REAL *level, REAL *row) {
  for (long j = 0; j < width; j++)
    for (int s = 0; s < 3 * channels; s++) row[(j + 1) * 3 * channels + s] = lines[s][j] - level[s % channels];
}

/* The patches of line i of a picture [channels, height, width] of at most four channels. `zeros` is a line of
   them; `row` is zero beyond the patches. */
static void expand(const PICTURE *p, const REAL *x, const double *levels, const REAL *zeros, long i,
                   REAL *row) {
  const REAL *lines[12];
  REAL level[4];
  for (long c = 0; c < p->channels; c++) {
    level[c] = (REAL)levels[c];
    for (long ky = 0; ky < 3; ky++) {
      const long line = i + ky - 1, s = ky * p->channels + c;
      lines[s] = line < 0 || line >= p->height ? zeros : x + (c * p->height + line) * p->width;
      row[s] = row[(p->width + 1) * p->column + s] = -level[c];
    }
  }
  switch (p->channels) {
    case 1: interleave(1, p->width, lines, level, row); break;
    case 2: interleave(2, p->width, lines, level, row); break;
    case 3: interleave(3, p->width, lines, level, row); break;
    default: interleave(4, p->width, lines, level, row);
  }
}

/* K[(kx, ky, c), o] from kernels [out, channels, 3, 3]. */
static void reorder_kernel(const PICTURE *p, long out, const REAL *w, REAL *k) {
  for (long o = 0; o < out; o++)
    for (long c = 0; c < p->channels; c++)
      for (long t = 0; t < 9; t++)
        k[((t % 3) * p->column + (t / 3) * p->channels + c) * out + o] = w[(o * p->channels + c) * 9 + t];
}

/* parts[i, :] += sum of column(e)[i] patch(e) over `count` columns from `first` on. */
static void add_products(const PICTURE *p, const REAL *row, long first, long count, REAL *parts) {
  const REAL *from = row + first * p->column;
  for (long j = 0; j < p->padded; j += 2 * LANES)
    for (long i = 0; i < p->column;) {
      REAL *to = parts + i * p->padded + j;
      if (i + 6 <= p->column) {
        tile(6, 2, 1, count, from + i, 1, p->column, from + j, p->column, to, p->padded);
        i += 6;
      } else {
        tile(3, 2, 1, count, from + i, 1, p->column, from + j, p->column, to, p->padded);
        i += 3;
      }
    }
}

/* Sums over the lines of a picture of products of a column and a patch: over the columns that every pair of
   kernel taps meets, and over those at the two ends that only some pairs do. The sum of patches comes last. */
enum { MIDDLE, BEFORE, BEGIN, LAST, AFTER, PARTS };

INLINE long parts_size(const PICTURE *p) { return (PARTS * p->column + 1) * p->padded; }

static void add_line(const PICTURE *p, const REAL *row, REAL *parts) {
  const long size = p->column * p->padded, w = p->width;
  const REAL one = 1;
  add_products(p, row, 1, w - 1, parts + MIDDLE * size);
  add_products(p, row, 0, 1, parts + BEFORE * size);
  add_products(p, row, 1, 1, parts + BEGIN * size);
  add_products(p, row, w, 1, parts + LAST * size);
  add_products(p, row, w + 1, 1, parts + AFTER * size);
  for (long j = 0; j < p->padded; j += 2 * LANES)
    tile(1, 2, 1, w, &one, 0, 0, row + j, p->column, parts + PARTS * size + j, p->padded);
}

/* sums[patch] and the centred gram[patch, patch] of `positions` patches from the parts. */
static void assemble_gram(const PICTURE *p, double positions, const double *parts, double *sums,
                          double *gram) {
  const long d = p->column, size = d * p->padded;
  for (long i = 0; i < p->patch; i++) sums[i] = parts[PARTS * size + i];
  for (long kx = 0; kx < 3; kx++)
    for (long other = kx; other < 3; other++)
      for (long i = 0; i < d; i++)
        for (long j = 0; j < d; j++) {
          const double *at = parts + i * p->padded + (other - kx) * d + j;
          double value = at[MIDDLE * size] + at[(kx == 0 ? BEFORE : LAST) * size];
          if (kx == 2) value += at[AFTER * size] - at[BEGIN * size];
          value -= sums[kx * d + i] * sums[other * d + j] / positions;
          gram[(kx * d + i) * p->patch + other * d + j] = value;
          gram[(other * d + j) * p->patch + kx * d + i] = value;
        }
}

/* sums[o, patch] += sum over a pair of expanded lines, `apart` elements from each other, of
   coefficient[window, o] times the patch that window took; coefficients are zero where there is NOBODY. */
static void add_taken(const PICTURE *p, long out, const REAL *rows, long apart, const REAL *coefficient,
                      const signed char *index, REAL *sums) {
  const long places[NOBODY + 1] = {0, p->column, apart, apart + p->column, 0};
  const long sums_row = p->padded + 4 * LANES;
  for (long o = 0; o < out; o += 2)
    for (long part = 0; part < p->padded; part += 4 * LANES) {
      VEC left[4], right[4];
      REAL *to = sums + o * sums_row + part, *next = to + sums_row;
      for (int v = 0; v < 4; v++) {
        left[v] = load(to + v * LANES);
        right[v] = load(next + v * LANES);
      }
      for (long j = 0; j < p->width / 2; j++) {
        const REAL *window = rows + 2 * j * p->column + part;
        const REAL *one = window + places[index[j * out + o]], *two = window + places[index[j * out + o + 1]];
        const REAL first = coefficient[j * out + o], second = coefficient[j * out + o + 1];
        for (int v = 0; v < 4; v++) left[v] += first * load(one + v * LANES);
        for (int v = 0; v < 4; v++) right[v] += second * load(two + v * LANES);
      }
      for (int v = 0; v < 4; v++) {
        store(to + v * LANES, left[v]);
        store(next + v * LANES, right[v]);
      }
    }
}
