/* The same block on pictures that need no gradient: y is never stored. Its statistics and the dense part of
   every weight gradient come from the patches' Gram matrix, the rest from the elements that pooling took.

   picture = levels [channels], sums of patches [p], centred Gram matrix [p, p], in double precision. */

typedef struct {
  PICTURE p;
  REAL *rows, *zeros, *kernel, *lines, *parts, *coefficient, *sums;
  long apart;   /* from the first expanded line to the second */
  double *wide_parts, *wide_sums, *wide_kernel, *product;
  CHANNELS k;
} FIRST;

static size_t first_lay_out(void *work, const long *shape, FIRST *room) {
  const long width = shape[2], out = shape[4];
  const size_t real = sizeof(REAL);
  size_t used = 0;
  const PICTURE p = room->p = picture_of(shape[1], width, shape[3]);
  room->apart = p.row + 4 * LANES;
  room->rows = carve(work, &used, real * (size_t)(2 * room->apart));
  room->zeros = carve(work, &used, real * (size_t)width);
  room->kernel = carve(work, &used, real * (size_t)(p.patch * out));
  room->lines = carve(work, &used, real * (size_t)((2 * width + 6) * out));
  room->parts = carve(work, &used, real * (size_t)parts_size(&p));
  room->coefficient = carve(work, &used, real * (size_t)(width / 2 * out));
  room->sums = carve(work, &used, real * (size_t)(out * (p.padded + 4 * LANES)));
  room->wide_parts = carve(work, &used, sizeof(double) * (size_t)parts_size(&p));
  room->wide_sums = carve(work, &used, sizeof(double) * (size_t)(p.patch * out));
  room->wide_kernel = carve(work, &used, sizeof(double) * (size_t)(p.patch * out));
  room->product = carve(work, &used, sizeof(double) * (size_t)(p.patch * out));
  carve_channels(work, &used, out, &room->k);
  return used;
}

EXPORT long first_room(const long *shape) {
  FIRST room;
  return (long)first_lay_out(NULL, shape, &room);
}

static void open_first(void *work, const long *shape, FIRST *room) {
  first_lay_out(work, shape, room);
  memset(room->rows, 0, sizeof(REAL) * (size_t)(2 * room->apart));
  memset(room->zeros, 0, sizeof(REAL) * (size_t)shape[2]);
}

/* wide = K in double precision and product = Gram K. */
static void multiply_gram(const FIRST *room, long out, const double *gram) {
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
static void find_levels(const PICTURE *p, const REAL *x, double *level) {
  const long area = p->height * p->width;
  for (long c = 0; c < p->channels; c++) {
    double sum = 0;
    for (long i = 0; i < area; i++) sum += (double)x[c * area + i];
    level[c] = (double)(REAL)(sum / (double)area);
  }
}

/* Expand lines 2 pair and 2 pair + 1; returns how many there are. */
static int expand_pair(const FIRST *room, const REAL *x, const double *level, long pair) {
  const int lines = 2 * pair + 1 < room->p.height ? 2 : 1;
  for (int s = 0; s < lines; s++)
    expand(&room->p, x, level, room->zeros, 2 * pair + s, room->rows + s * room->apart);
  return lines;
}

/* y of an expanded pair of lines. The second product overwrites what the first one wrote beyond its line. */
static void convolve_pair(const FIRST *room, long co) {
  const PICTURE *p = &room->p;
  for (int s = 0; s < 2; s++)
    product(p->width, p->patch, co, room->rows + s * room->apart, p->column, room->kernel,
            room->lines + s * p->width * co);
}

EXPORT void first_forward(const long *shape, double eps, const REAL *x, const REAL *weight,
                          const REAL *scale, const REAL *shift, double *picture, REAL *pooled,
                          signed char *index, double *stats, REAL *out, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], co = shape[4];
  FIRST room;
  open_first(work, shape, &room);
  const PICTURE *p = &room.p;
  const long size = parts_size(p), pooled_line = (w / 2) * co, quarter = (h / 2) * pooled_line;
  find_levels(p, x, picture);
  reorder_kernel(p, co, weight, room.kernel);
  memset(room.wide_parts, 0, sizeof(double) * (size_t)size);
  for (long i = 0; i < n; i++)
    for (long pair = 0; pair < (h + 1) / 2; pair++) {
      const int lines = expand_pair(&room, x + i * h * w * p->channels, picture, pair);
      if (pair % 4 == 0) memset(room.parts, 0, sizeof(REAL) * (size_t)size);
      for (int s = 0; s < lines; s++) add_line(p, room.rows + s * room.apart, room.parts);
      if (pair % 4 == 3 || pair == (h - 1) / 2)
        for (long k = 0; k < size; k++) room.wide_parts[k] += (double)room.parts[k];
      if (lines == 1) break;
      convolve_pair(&room, co);
      const long at = i * quarter + pair * pooled_line;
      pool(2, w, co, room.lines, scale, pooled + at, index + at);
    }
  double *sums = picture + p->channels, positions = (double)(n * h * w);
  assemble_gram(p, positions, room.wide_parts, sums, sums + p->patch);
  multiply_gram(&room, co, sums + p->patch);
  memset(stats, 0, sizeof(double) * (size_t)(2 * co));
  for (long i = 0; i < p->patch; i++)
    for (long c = 0; c < co; c++) {
      stats[c] += room.wide_kernel[i * co + c] * sums[i] / positions;
      stats[co + c] += room.wide_kernel[i * co + c] * room.product[i * co + c] / positions;
    }
  for (long c = 0; c < co; c++) stats[co + c] = 1 / sqrt((stats[co + c] < 0 ? 0 : stats[co + c]) + eps);
  open_channels(co, scale, stats, &room.k);
  activate(n * (h / 2) * (w / 2), co, pooled, room.k.gain, room.k.mean, shift, out, index);
}

/* dw[o, c, ky, kx] from [(kx, ky, c), o]. */
static void restore_kernel(const PICTURE *p, long co, const double *k, REAL *w) {
  for (long o = 0; o < co; o++)
    for (long c = 0; c < p->channels; c++)
      for (long t = 0; t < 9; t++)
        w[(o * p->channels + c) * 9 + t] = (REAL)k[((t % 3) * p->column + (t / 3) * p->channels + c) * co + o];
}

/* Cotangents of weight, scale and shift from those of the output, g, and of what was taken, g_pooled (or NULL). */
EXPORT void first_backward(const long *shape, const REAL *x, const REAL *weight, const REAL *scale,
                           const double *picture, const REAL *pooled, const signed char *index,
                           const double *stats, const REAL *g, const REAL *g_pooled, REAL *dw,
                           REAL *d_scale, REAL *d_shift, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], co = shape[4];
  FIRST room;
  open_first(work, shape, &room);
  const PICTURE *p = &room.p;
  CHANNELS *k = &room.k;
  const long pooled_line = (w / 2) * co, quarter = (h / 2) * pooled_line, apart = p->padded + 4 * LANES;
  open_channels(co, scale, stats, k);
  memset(room.wide_sums, 0, sizeof(double) * (size_t)(p->patch * co));
  for (long i = 0; i < n; i++) {
    memset(room.sums, 0, sizeof(REAL) * (size_t)(co * apart));
    for (long pair = 0; pair < h / 2; pair++) {
      const long at = i * quarter + pair * pooled_line;
      expand_pair(&room, x + i * h * w * p->channels, picture, pair);
      add_cotangents(w / 2, co, g + at, pooled + at, index + at, k);
      scale_taken(w / 2, co, k->gain, g + at, index + at, g_pooled ? g_pooled + at : NULL, room.coefficient);
      add_taken(p, co, room.rows, room.apart, room.coefficient, index + at, room.sums);
    }
    for (long t = 0; t < p->patch; t++)
      for (long c = 0; c < co; c++) room.wide_sums[t * co + c] += (double)room.sums[c * apart + t];
  }
  const double *sums = picture + p->channels;
  close_sums(co, (double)(n * h * w), stats, k);
  first_derivative(co, (double)(n * h * w), stats, k);
  reorder_kernel(p, co, weight, room.kernel);
  multiply_gram(&room, co, sums + p->patch);
  for (long t = 0; t < p->patch; t++)
    for (long c = 0; c < co; c++)
      room.wide_sums[t * co + c] +=
          (double)k->dense[c] * room.product[t * co + c] + (double)k->constant[c] * sums[t];
  restore_kernel(p, co, room.wide_sums, dw);
  for (long c = 0; c < co; c++) {
    d_shift[c] = (REAL)k->a[c];
    d_scale[c] = (REAL)k->b[c];
  }
}

/* The sums of u = conv(x, vw) and of u (y - mean). Leaves vw's kernel in the room. */
static void sum_first_tangent(FIRST *room, long co, const REAL *vw, const double *sums) {
  const PICTURE *p = &room->p;
  reorder_kernel(p, co, vw, room->kernel);
  for (long t = 0; t < p->patch; t++)
    for (long c = 0; c < co; c++) {
      room->k.u_mean[c] += (double)room->kernel[t * co + c] * sums[t];
      room->k.u_y[c] += (double)room->kernel[t * co + c] * room->product[t * co + c];
    }
}

/* Cotangents of g, of what was taken, of weight and scale from those of first_backward's results, which may be
   NULL. What of the second derivative is dense in y is linear in the kernels and goes into dw at once. */
EXPORT void first_double(const long *shape, const REAL *x, const REAL *weight, const REAL *scale,
                         const double *picture, const REAL *pooled, const signed char *index,
                         const double *stats, const REAL *g, const REAL *vw, const REAL *v_scale,
                         const REAL *v_shift, REAL *dg, REAL *d_pooled, REAL *dw, REAL *d_scale, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], co = shape[4];
  FIRST room;
  open_first(work, shape, &room);
  const PICTURE *p = &room.p;
  CHANNELS *k = &room.k;
  const long pooled_line = (w / 2) * co, quarter = (h / 2) * pooled_line;
  const double *sums = picture + p->channels, positions = (double)(n * h * w);
  open_channels(co, scale, stats, k);
  reorder_kernel(p, co, weight, room.kernel);
  multiply_gram(&room, co, sums + p->patch);
  if (vw) sum_first_tangent(&room, co, vw, sums);
  close_sums(co, positions, stats, k);
  tangent_coefficients(co, scale, stats, v_scale, v_shift, k);
  const MIX tangent = {NULL, k->sparse, k->offset, k->mean, k->gain};
  for (long i = 0; i < n; i++)
    for (long pair = 0; pair < h / 2; pair++) {
      const long at = i * quarter + pair * pooled_line;
      if (vw) {
        expand_pair(&room, x + i * h * w * p->channels, picture, pair);
        convolve_pair(&room, co);
        take(2, w, co, room.lines, index + at, dg + at);
        add_sums(w / 2, co, g + at, dg + at, NULL, index + at, NULL, k->g_u);
      } else
        memset(dg + at, 0, sizeof(REAL) * (size_t)pooled_line);
      add_cotangents(w / 2, co, g + at, pooled + at, index + at, k);
      carry_tangent(w / 2, co, dg + at, pooled + at, index + at, &tangent, dg + at);
      scale_taken(w / 2, co, k->sparse, g + at, index + at, NULL, d_pooled + at);
    }
  for (long c = 0; c < co; c++) k->b[c] *= stats[co + c];
  second_derivative(co, positions, scale, stats, v_scale, k, d_scale);
  for (long t = 0; t < p->patch; t++)
    for (long c = 0; c < co; c++)
      room.wide_sums[t * co + c] = (double)k->dense[c] * room.product[t * co + c] -
                                   (double)k->sparse[c] * k->a[c] / positions * sums[t];
  if (vw) {
    multiply_gram(&room, co, sums + p->patch);
    for (long t = 0; t < p->patch; t++)
      for (long c = 0; c < co; c++) room.wide_sums[t * co + c] += (double)k->other[c] * room.product[t * co + c];
  }
  restore_kernel(p, co, room.wide_sums, dw);
}
