/* The block over maps: conv -> normalise -> ReLU -> pool, its derivative, and the derivative of that.
   Every function works picture by picture, so its workspace does not grow with their number. */

typedef struct {
  GRID grid;
  REAL *kernels, *inputs, *products, *taps, *sums, *total, *plane[2];
  long pending;   /* tiles in `sums` that are not in `total` yet */
  CHANNELS k;
} NAME(room);
#define ROOM NAME(room)

static size_t NAME(lay_out)(void *work, long height, long width, long in, long out, ROOM *room) {
  const long most = in > out ? in : out;
  const size_t real = sizeof(REAL);
  size_t used = 0;
  room->grid = NAME(grid_of)(height, width);
  room->kernels = carve(work, &used, real * (size_t)(32 * in * out));
  room->taps = carve(work, &used, real * (size_t)(9 * in * out));
  room->inputs = carve(work, &used, real * (size_t)(16 * LAYER(2 * most)));
  room->products = carve(work, &used, real * (size_t)(16 * LAYER(most)));
  room->sums = carve(work, &used, real * (size_t)(16 * in * out));
  room->total = carve(work, &used, real * (size_t)(16 * in * out));
  for (int p = 0; p < 2; p++)
    room->plane[p] = carve(work, &used, real * (size_t)NAME(plane_size)(&room->grid, most));
  NAME(carve_channels)(work, &used, out, &room->k);
  return used;
}

EXPORT long NAME(block_room)(const long *shape) {
  ROOM room;
  return (long)NAME(lay_out)(NULL, shape[1], shape[2], shape[3], shape[4], &room);
}

/* Borders must be zero; another call may have left other planes in the workspace. */
static void NAME(clear_planes)(ROOM *room, long channels0, long channels1) {
  memset(room->plane[0], 0, sizeof(REAL) * (size_t)NAME(plane_size)(&room->grid, channels0));
  memset(room->plane[1], 0, sizeof(REAL) * (size_t)NAME(plane_size)(&room->grid, channels1));
}

/* Tiles that are summed before the sum moves to the total: two levels keep single precision precise. */
#define SUMMED 256L

static void NAME(open_correlation)(ROOM *room, long in, long out) {
  room->pending = 0;
  memset(room->sums, 0, sizeof(REAL) * (size_t)(16 * in * out));
  memset(room->total, 0, sizeof(REAL) * (size_t)(16 * in * out));
}

static void NAME(settle_correlation)(ROOM *room, long in, long out) {
  for (long i = 0; i < 16 * in * out; i++) room->total[i] += room->sums[i];
  memset(room->sums, 0, sizeof(REAL) * (size_t)(16 * in * out));
  room->pending = 0;
}

/* Add one picture's weight gradient. */
static void NAME(add_correlation)(ROOM *room, long in, long out, const REAL *x, const REAL *dy) {
  NAME(correlate)(&room->grid, in, out, x, dy, room->inputs, room->products, room->sums);
  room->pending += room->grid.rows * room->grid.cols;
  if (room->pending >= SUMMED) NAME(settle_correlation)(room, in, out);
}

static void NAME(close_correlation)(ROOM *room, long in, long out, REAL *dw) {
  NAME(settle_correlation)(room, in, out);
  NAME(kernel_gradient)(out, in, room->total, room->taps, dw);
}

/* U of a kernel [out, in, 3, 3], or of the one that carries cotangents back. */
static void NAME(prepare_kernel)(ROOM *room, long in, long out, const REAL *w, long depth, long first) {
  NAME(gather_taps)(out, in, w, 0, room->taps);
  NAME(transform_kernel)(in, out, room->taps, depth, first, room->kernels);
}

static void NAME(prepare_turned_kernel)(ROOM *room, long in, long out, const REAL *w) {
  NAME(gather_taps)(out, in, w, 1, room->taps);
  NAME(transform_kernel)(out, in, room->taps, out, 0, room->kernels);
}

/* shape = pictures, height, width, channels in, channels out. */
EXPORT void NAME(block_forward)(const long *shape, double eps, const REAL *x, const REAL *weight,
                                const REAL *scale, const REAL *shift, REAL *y, REAL *pooled,
                                signed char *index, double *stats, REAL *out, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], ci = shape[3], co = shape[4];
  const long whole = h * w, quarter = (h / 2) * (w / 2);
  ROOM room;
  NAME(lay_out)(work, h, w, ci, co, &room);
  NAME(clear_planes)(&room, ci, 0);
  NAME(prepare_kernel)(&room, ci, co, weight, ci, 0);
  memset(stats, 0, sizeof(double) * (size_t)(2 * co));
  for (long i = 0; i < n; i++) {
    REAL *map = y + i * whole * co;
    NAME(enclose)(&room.grid, ci, x + i * whole * ci, room.plane[0]);
    NAME(convolve)(&room.grid, 1, room.plane, ci, co, room.kernels, room.inputs, room.products, map);
    NAME(add_moments)(whole, co, map, i, stats, stats + co);
    NAME(pool)(h, w, co, map, scale, pooled + i * quarter * co, index + i * quarter * co);
  }
  for (long c = 0; c < co; c++) stats[co + c] = 1 / sqrt(stats[co + c] / (double)(n * whole) + eps);
  NAME(open_channels)(co, scale, stats, &room.k);
  NAME(activate)(n * quarter, co, pooled, room.k.gain, room.k.mean, shift, out, index);
}

/* Cotangents of x (may be NULL), weight, scale and shift from those of the output, g, and of y, gy (may be NULL). */
EXPORT void NAME(block_backward)(const long *shape, const REAL *x, const REAL *weight, const REAL *scale,
                                 const REAL *y, const REAL *pooled, const signed char *index,
                                 const double *stats, const REAL *g, const REAL *gy, REAL *dx, REAL *dw,
                                 REAL *d_scale, REAL *d_shift, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], ci = shape[3], co = shape[4];
  const long whole = h * w, quarter = (h / 2) * (w / 2);
  ROOM room;
  NAME(lay_out)(work, h, w, ci, co, &room);
  NAME(clear_planes)(&room, co, ci);
  NAME(open_channels)(co, scale, stats, &room.k);
  NAME(add_cotangents)(n * quarter, co, g, pooled, index, &room.k);
  NAME(close_sums)(co, (double)(n * whole), stats, &room.k);
  NAME(first_derivative)(co, (double)(n * whole), stats, &room.k);
  for (long c = 0; c < co; c++) {
    d_shift[c] = (REAL)room.k.a[c];
    d_scale[c] = (REAL)room.k.b[c];
  }
  const MIX mix = {room.k.sparse, room.k.dense, room.k.constant, room.k.mean, room.k.other};
  const long line = room.grid.stride * co;
  if (dx) NAME(prepare_turned_kernel)(&room, ci, co, weight);
  NAME(open_correlation)(&room, ci, co);
  for (long i = 0; i < n; i++) {
    NAME(spread)(h, w, co, &mix, g + i * quarter * co, index + i * quarter * co, y + i * whole * co,
                 gy ? gy + i * whole * co : NULL, room.plane[0] + line + co, line);
    if (dx)
      NAME(convolve)(&room.grid, 1, room.plane, co, ci, room.kernels, room.inputs, room.products,
                     dx + i * whole * ci);
    NAME(enclose)(&room.grid, ci, x + i * whole * ci, room.plane[1]);
    NAME(add_correlation)(&room, ci, co, room.plane[1], room.plane[0]);
  }
  NAME(close_correlation)(&room, ci, co, dw);
}

/* u = conv(vx, w) + conv(x, vw) for every picture, its sums, and what the index takes of it. */
static void NAME(block_tangent)(const long *shape, ROOM *room, const REAL *x, const REAL *weight, const REAL *y,
                                const signed char *index, const REAL *g, const REAL *vx, const REAL *vw, REAL *u,
                                REAL *taken) {
  const long n = shape[0], h = shape[1], w = shape[2], ci = shape[3], co = shape[4];
  const long whole = h * w, quarter = (h / 2) * (w / 2);
  const int planes = (vx != NULL) + (vw != NULL);
  const REAL *source[2] = {vx ? vx : x, x}, *kernel[2] = {vx ? weight : vw, vw};
  CHANNELS *k = &room->k;
  NAME(clear_planes)(room, ci, ci);
  for (int p = 0; p < planes; p++)
    NAME(prepare_kernel)(room, ci, co, kernel[p], planes * ci, p * ci);
  for (long i = 0; i < n; i++) {
    REAL *map = u + i * whole * co;
    for (int p = 0; p < planes; p++)
      NAME(enclose)(&room->grid, ci, source[p] + i * whole * ci, room->plane[p]);
    NAME(convolve)(&room->grid, planes, room->plane, ci, co, room->kernels, room->inputs, room->products, map);
    NAME(add_sums)(whole, co, map, y + i * whole * co, k->mean, NULL, k->u_mean, k->u_y);
    const long at = i * quarter * co;
    NAME(take)(h, w, co, map, index + at, taken + at);
    NAME(add_sums)(quarter, co, g + at, taken + at, NULL, index + at, NULL, k->g_u);
  }
}

/* Cotangents of g, y, x, weight and scale from those of block_backward's results vx, vw, v_scale and v_shift,
   any of which may be NULL. dx is written if there is a vw, dw if there is a vx. */
EXPORT void NAME(block_double)(const long *shape, const REAL *x, const REAL *weight, const REAL *scale,
                               const REAL *y, const REAL *pooled, const signed char *index,
                               const double *stats, const REAL *g, const REAL *vx, const REAL *vw,
                               const REAL *v_scale, const REAL *v_shift, REAL *dg, REAL *dy, REAL *dx, REAL *dw,
                               REAL *d_scale, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], ci = shape[3], co = shape[4];
  const long whole = h * w, quarter = (h / 2) * (w / 2);
  ROOM room;
  NAME(lay_out)(work, h, w, ci, co, &room);
  NAME(open_channels)(co, scale, stats, &room.k);
  NAME(add_cotangents)(n * quarter, co, g, pooled, index, &room.k);
  NAME(block_tangent)(shape, &room, x, weight, y, index, g, vx, vw, dy, dg);
  NAME(close_sums)(co, (double)(n * whole), stats, &room.k);
  NAME(tangent_coefficients)(co, scale, stats, v_scale, v_shift, &room.k);
  NAME(second_derivative)(co, (double)(n * whole), scale, stats, v_scale, &room.k, d_scale);
  const MIX tangent = {NULL, room.k.sparse, room.k.offset, room.k.mean, room.k.gain};
  NAME(tangent)(n * quarter, co, dg, pooled, index, &tangent, dg);
  const MIX second = {room.k.sparse, room.k.dense, room.k.constant, room.k.mean, room.k.other};
  for (long i = 0; i < n; i++) {
    REAL *map = dy + i * whole * co;
    NAME(spread)(h, w, co, &second, g + i * quarter * co, index + i * quarter * co, y + i * whole * co, map, map,
                 w * co);
  }
  NAME(first_derivative)(co, (double)(n * whole), stats, &room.k);
  const MIX first = {room.k.sparse, room.k.dense, room.k.constant, room.k.mean, room.k.other};
  const long line = room.grid.stride * co;
  NAME(clear_planes)(&room, co, ci);
  if (vw) NAME(prepare_turned_kernel)(&room, ci, co, vw);
  NAME(open_correlation)(&room, ci, co);
  for (long i = 0; i < n; i++) {
    NAME(spread)(h, w, co, &first, g + i * quarter * co, index + i * quarter * co, y + i * whole * co, NULL,
                 room.plane[0] + line + co, line);
    if (vw)
      NAME(convolve)(&room.grid, 1, room.plane, co, ci, room.kernels, room.inputs, room.products,
                     dx + i * whole * ci);
    if (!vx) continue;
    NAME(enclose)(&room.grid, ci, vx + i * whole * ci, room.plane[1]);
    NAME(add_correlation)(&room, ci, co, room.plane[1], room.plane[0]);
  }
  if (vx) NAME(close_correlation)(&room, ci, co, dw);
}
