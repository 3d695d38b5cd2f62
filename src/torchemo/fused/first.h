/* The same block on pictures that need no gradient: y is never stored. Its statistics and the dense part of
   every weight gradient come from the patches' Gram matrix, the rest from the elements that pooling took.

   picture = levels [channels], sums of patches [p], centred Gram matrix [p, p], in double precision. */

typedef struct {
  PICTURE p;
  REAL *row[2], *kernel, *lines, *parts, *coefficient, *sums;
  double *wide_parts, *wide_sums, *wide_kernel, *product;
  CHANNELS k;
} NAME(first);
#define FIRST NAME(first)

static size_t NAME(first_lay_out)(void *work, long height, long width, long in, long out, FIRST *room) {
  const size_t real = sizeof(REAL);
  size_t used = 0;
  const PICTURE p = room->p = NAME(picture_of)(height, width, in);
  for (int i = 0; i < 2; i++) room->row[i] = carve(work, &used, real * (size_t)(p.row + 4 * LANES));
  room->kernel = carve(work, &used, real * (size_t)(p.patch * out));
  room->lines = carve(work, &used, real * (size_t)((2 * width + 6) * out));
  room->parts = carve(work, &used, real * (size_t)NAME(parts_size)(&p));
  room->coefficient = carve(work, &used, real * (size_t)(width / 2 * out));
  room->sums = carve(work, &used, real * (size_t)(out * (p.padded + 4 * LANES)));
  room->wide_parts = carve(work, &used, sizeof(double) * (size_t)NAME(parts_size)(&p));
  room->wide_sums = carve(work, &used, sizeof(double) * (size_t)(p.patch * out));
  room->wide_kernel = carve(work, &used, sizeof(double) * (size_t)(p.patch * out));
  room->product = carve(work, &used, sizeof(double) * (size_t)(p.patch * out));
  NAME(carve_channels)(work, &used, out, &room->k);
  return used;
}

EXPORT long NAME(first_room)(const long *shape) {
  FIRST room;
  return (long)NAME(first_lay_out)(NULL, shape[1], shape[2], shape[3], shape[4], &room);
}

static void NAME(open_first)(void *work, const long *shape, FIRST *room) {
  NAME(first_lay_out)(work, shape[1], shape[2], shape[3], shape[4], room);
  for (int i = 0; i < 2; i++) memset(room->row[i], 0, sizeof(REAL) * (size_t)(room->p.row + 4 * LANES));
}

/* wide = K in double precision and product = Gram K. */
static void NAME(multiply_gram)(const FIRST *room, long out, const double *gram) {
  const long patch = room->p.patch;
  for (long i = 0; i < patch * out; i++) room->wide_kernel[i] = (double)room->kernel[i];
  for (long i = 0; i < patch; i++) {
    double *to = room->product + i * out;
    memset(to, 0, sizeof(double) * (size_t)out);
    for (long j = 0; j < patch; j++)
      for (long o = 0; o < out; o++) to[o] += gram[i * patch + j] * room->wide_kernel[j * out + o];
  }
}

/* One constant per channel near the pictures' values: the means of the first picture. */
static void NAME(find_levels)(const PICTURE *p, const REAL *x, double *level) {
  const long area = p->height * p->width;
  for (long c = 0; c < p->channels; c++) {
    double sum = 0;
    for (long i = 0; i < area; i++) sum += (double)x[c * area + i];
    level[c] = (double)(REAL)(sum / (double)area);
  }
}

/* Expand lines 2 pair and 2 pair + 1; returns how many there are. */
static int NAME(expand_pair)(const FIRST *room, const REAL *x, const double *level, long pair) {
  const int lines = 2 * pair + 1 < room->p.height ? 2 : 1;
  for (int s = 0; s < lines; s++) NAME(expand)(&room->p, x, level, 2 * pair + s, room->row[s]);
  return lines;
}

/* y of an expanded pair of lines. The second product overwrites what the first one wrote beyond its line. */
static void NAME(convolve_pair)(const FIRST *room, long co) {
  const PICTURE *p = &room->p;
  for (int s = 0; s < 2; s++)
    NAME(product)(p->width, p->patch, co, room->row[s], p->column, room->kernel, room->lines + s * p->width * co);
}

EXPORT void NAME(first_forward)(const long *shape, double eps, const REAL *x, const REAL *weight,
                                const REAL *scale, const REAL *shift, double *picture, REAL *pooled,
                                signed char *index, double *stats, REAL *out, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], co = shape[4];
  FIRST room;
  NAME(open_first)(work, shape, &room);
  const PICTURE *p = &room.p;
  const long size = NAME(parts_size)(p), pooled_line = (w / 2) * co, quarter = (h / 2) * pooled_line;
  NAME(find_levels)(p, x, picture);
  NAME(reorder_kernel)(p, co, weight, room.kernel);
  memset(room.wide_parts, 0, sizeof(double) * (size_t)size);
  for (long i = 0; i < n; i++)
    for (long pair = 0; pair < (h + 1) / 2; pair++) {
      const int lines = NAME(expand_pair)(&room, x + i * h * w * p->channels, picture, pair);
      memset(room.parts, 0, sizeof(REAL) * (size_t)size);
      for (int s = 0; s < lines; s++) NAME(add_line)(p, room.row[s], room.parts);
      for (long k = 0; k < size; k++) room.wide_parts[k] += (double)room.parts[k];
      if (lines == 1) break;
      NAME(convolve_pair)(&room, co);
      const long at = i * quarter + pair * pooled_line;
      NAME(pool)(2, w, co, room.lines, scale, pooled + at, index + at);
    }
  double *sums = picture + p->channels, positions = (double)(n * h * w);
  NAME(assemble_gram)(p, positions, room.wide_parts, sums, sums + p->patch);
  NAME(multiply_gram)(&room, co, sums + p->patch);
  memset(stats, 0, sizeof(double) * (size_t)(2 * co));
  for (long i = 0; i < p->patch; i++)
    for (long c = 0; c < co; c++) {
      stats[c] += room.wide_kernel[i * co + c] * sums[i] / positions;
      stats[co + c] += room.wide_kernel[i * co + c] * room.product[i * co + c] / positions;
    }
  for (long c = 0; c < co; c++) stats[co + c] = 1 / sqrt((stats[co + c] < 0 ? 0 : stats[co + c]) + eps);
  NAME(open_channels)(co, scale, stats, &room.k);
  NAME(activate)(n * (h / 2) * (w / 2), co, pooled, room.k.gain, room.k.mean, shift, out, index);
}

/* dw[o, c, ky, kx] from [(kx, ky, c), o]. */
static void NAME(restore_kernel)(const PICTURE *p, long co, const double *k, REAL *w) {
  for (long o = 0; o < co; o++)
    for (long c = 0; c < p->channels; c++)
      for (long t = 0; t < 9; t++)
        w[(o * p->channels + c) * 9 + t] = (REAL)k[((t % 3) * p->column + (t / 3) * p->channels + c) * co + o];
}

/* Cotangents of weight, scale and shift from those of the output, g, and of what was taken, g_pooled (or NULL). */
EXPORT void NAME(first_backward)(const long *shape, const REAL *x, const REAL *weight, const REAL *scale,
                                 const double *picture, const REAL *pooled, const signed char *index,
                                 const double *stats, const REAL *g, const REAL *g_pooled, REAL *dw,
                                 REAL *d_scale, REAL *d_shift, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], co = shape[4];
  FIRST room;
  NAME(open_first)(work, shape, &room);
  const PICTURE *p = &room.p;
  CHANNELS *k = &room.k;
  const long pooled_line = (w / 2) * co, quarter = (h / 2) * pooled_line, apart = p->padded + 4 * LANES;
  NAME(open_channels)(co, scale, stats, k);
  NAME(sum_cotangents)(n * (h / 2) * (w / 2), co, g, pooled, index, stats, k);
  NAME(first_derivative)(co, (double)(n * h * w), stats, k);
  memset(room.wide_sums, 0, sizeof(double) * (size_t)(p->patch * co));
  for (long i = 0; i < n; i++) {
    memset(room.sums, 0, sizeof(REAL) * (size_t)(co * apart));
    for (long pair = 0; pair < h / 2; pair++) {
      const long at = i * quarter + pair * pooled_line;
      NAME(expand_pair)(&room, x + i * h * w * p->channels, picture, pair);
      NAME(scale_taken)(w / 2, co, k->gain, g + at, index + at, g_pooled ? g_pooled + at : NULL, room.coefficient);
      NAME(add_taken)(p, co, (const REAL *const *)room.row, room.coefficient, index + at, room.sums);
    }
    for (long t = 0; t < p->patch; t++)
      for (long c = 0; c < co; c++) room.wide_sums[t * co + c] += (double)room.sums[c * apart + t];
  }
  const double *sums = picture + p->channels;
  NAME(reorder_kernel)(p, co, weight, room.kernel);
  NAME(multiply_gram)(&room, co, sums + p->patch);
  for (long t = 0; t < p->patch; t++)
    for (long c = 0; c < co; c++)
      room.wide_sums[t * co + c] +=
          (double)k->dense[c] * room.product[t * co + c] + (double)k->constant[c] * sums[t];
  NAME(restore_kernel)(p, co, room.wide_sums, dw);
  for (long c = 0; c < co; c++) {
    d_shift[c] = (REAL)k->a[c];
    d_scale[c] = (REAL)k->b[c];
  }
}

/* u = conv(x, vw) where pooling took an element, and the sums of u and u (y - mean). */
static void NAME(first_tangent)(const long *shape, FIRST *room, const REAL *x, const REAL *vw,
                                const double *picture, const signed char *index, REAL *taken) {
  const long n = shape[0], h = shape[1], w = shape[2], co = shape[4];
  const PICTURE *p = &room->p;
  const long pooled_line = (w / 2) * co, quarter = (h / 2) * pooled_line;
  const double *sums = picture + p->channels;
  NAME(reorder_kernel)(p, co, vw, room->kernel);
  for (long t = 0; t < p->patch; t++)
    for (long c = 0; c < co; c++) {
      room->k.u_mean[c] += (double)room->kernel[t * co + c] * sums[t];
      room->k.u_y[c] += (double)room->kernel[t * co + c] * room->product[t * co + c];
    }
  for (long i = 0; i < n; i++)
    for (long pair = 0; pair < h / 2; pair++) {
      const long at = i * quarter + pair * pooled_line;
      NAME(expand_pair)(room, x + i * h * w * p->channels, picture, pair);
      NAME(convolve_pair)(room, co);
      NAME(take)(2, w, co, room->lines, index + at, taken + at);
    }
}

/* Cotangents of g, of what was taken, of weight and scale from those of first_backward's results, which may be
   NULL. What of the second derivative is dense in y is linear in the kernels and goes into dw at once. */
EXPORT void NAME(first_double)(const long *shape, const REAL *x, const REAL *weight, const REAL *scale,
                               const double *picture, const REAL *pooled, const signed char *index,
                               const double *stats, const REAL *g, const REAL *vw, const REAL *v_scale,
                               const REAL *v_shift, REAL *dg, REAL *d_pooled, REAL *dw, REAL *d_scale, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], co = shape[4], quarter = (h / 2) * (w / 2);
  FIRST room;
  NAME(open_first)(work, shape, &room);
  const PICTURE *p = &room.p;
  CHANNELS *k = &room.k;
  const double *sums = picture + p->channels, positions = (double)(n * h * w);
  NAME(open_channels)(co, scale, stats, k);
  NAME(sum_cotangents)(n * quarter, co, g, pooled, index, stats, k);
  NAME(reorder_kernel)(p, co, weight, room.kernel);
  NAME(multiply_gram)(&room, co, sums + p->patch);
  memset(dg, 0, sizeof(REAL) * (size_t)(n * quarter * co));
  if (vw) NAME(first_tangent)(shape, &room, x, vw, picture, index, dg);
  NAME(sum_tangents)(n * quarter, co, positions, g, dg, index, stats, k);
  NAME(second_derivative)(co, positions, scale, stats, v_scale, v_shift, k, d_scale);
  const MIX tangent = {NULL, k->sparse, k->offset, k->mean, k->gain};
  NAME(tangent)(n * quarter, co, dg, pooled, index, &tangent, dg);
  NAME(scale_taken)(n * quarter, co, k->sparse, g, index, NULL, d_pooled);
  for (long t = 0; t < p->patch; t++)
    for (long c = 0; c < co; c++)
      room.wide_sums[t * co + c] = (double)k->dense[c] * room.product[t * co + c] -
                                   (double)k->sparse[c] * k->a[c] / positions * sums[t];
  if (vw) {
    NAME(reorder_kernel)(p, co, vw, room.kernel);
    NAME(multiply_gram)(&room, co, sums + p->patch);
    for (long t = 0; t < p->patch; t++)
      for (long c = 0; c < co; c++) room.wide_sums[t * co + c] += (double)k->other[c] * room.product[t * co + c];
  }
  NAME(restore_kernel)(p, co, room.wide_sums, dw);
}
