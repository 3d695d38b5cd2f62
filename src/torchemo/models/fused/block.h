/* The block over maps: conv -> normalise -> ReLU -> pool, its derivative, and the derivative of that.
   Every function works on a few pictures at a time, so its workspace does not grow with their number. */

typedef struct {
  GRID grid;
  REAL *kernels, *inputs, *products, *taps, *sums, *total, *plane[2];
  long pending;   /* tiles in `sums` that are not in `total` yet */
  CHANNELS k;
} ROOM;

static size_t lay_out(void *work, const long *shape, ROOM *room) {
  const long in = shape[3], out = shape[4];
  const long most = in > out ? in : out;
  const size_t real = sizeof(REAL);
  size_t used = 0;
  room->grid = grid_of(shape[0], shape[1], shape[2]);
  room->kernels = carve(work, &used, real * (size_t)(32 * in * out));
  room->taps = carve(work, &used, real * (size_t)(9 * in * out));
  room->inputs = carve(work, &used, real * (size_t)(16 * LAYER(2 * most)));
  room->products = carve(work, &used, real * (size_t)(16 * LAYER(most)));
  room->sums = carve(work, &used, real * (size_t)(16 * in * out));
  room->total = carve(work, &used, real * (size_t)(16 * in * out));
  for (int p = 0; p < 2; p++)
    room->plane[p] = carve(work, &used, real * (size_t)(room->grid.pictures * plane_size(&room->grid, most)));
  carve_channels(work, &used, out, &room->k);
  return used;
}

EXPORT long block_room(const long *shape) {
  ROOM room;
  return (long)lay_out(NULL, shape, &room);
}

/* Borders must be zero; another call may have left other planes in the workspace. */
static void clear_planes(ROOM *room, long channels0, long channels1) {
  memset(room->plane[0], 0, sizeof(REAL) * (size_t)(room->grid.pictures * plane_size(&room->grid, channels0)));
  memset(room->plane[1], 0, sizeof(REAL) * (size_t)(room->grid.pictures * plane_size(&room->grid, channels1)));
}

/* Tiles that are summed before the sum moves to the total: two levels keep single precision precise. */
#define SUMMED 256L

static void open_correlation(ROOM *room, long in, long out) {
  room->pending = 0;
  memset(room->sums, 0, sizeof(REAL) * (size_t)(16 * in * out));
  memset(room->total, 0, sizeof(REAL) * (size_t)(16 * in * out));
}

static void settle_correlation(ROOM *room, long in, long out) {
  for (long i = 0; i < 16 * in * out; i++) room->total[i] += room->sums[i];
  memset(room->sums, 0, sizeof(REAL) * (size_t)(16 * in * out));
  room->pending = 0;
}

/* Add the weight gradient of a group of pictures. */
static void add_correlation(ROOM *room, long pictures, long in, long out, const REAL *x, const REAL *dy) {
  correlate(&room->grid, pictures, in, out, x, dy, room->inputs, room->products, room->sums);
  room->pending += pictures * room->grid.rows * room->grid.cols;
  if (room->pending >= SUMMED) settle_correlation(room, in, out);
}

static void close_correlation(ROOM *room, long in, long out, REAL *dw) {
  settle_correlation(room, in, out);
  kernel_gradient(out, in, room->total, room->taps, dw);
}

/* U of a kernel [out, in, 3, 3], or of the one that carries cotangents back. */
static void prepare_kernel(ROOM *room, long in, long out, const REAL *w, long depth, long first) {
  gather_taps(out, in, w, 0, room->taps);
  transform_kernel(in, out, room->taps, depth, first, room->kernels);
}

static void prepare_turned_kernel(ROOM *room, long in, long out, const REAL *w) {
  gather_taps(out, in, w, 1, room->taps);
  transform_kernel(out, in, room->taps, out, 0, room->kernels);
}

/* How many pictures the group that begins at picture i has. */
INLINE long group(const ROOM *room, long n, long i) {
  return n - i < room->grid.pictures ? n - i : room->grid.pictures;
}

/* shape = pictures, height, width, channels in, channels out. */
EXPORT void block_forward(const long *shape, double eps, const REAL *x, const REAL *weight,
                          const REAL *scale, const REAL *shift, REAL *y, REAL *pooled,
                          signed char *index, double *stats, REAL *out, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], ci = shape[3], co = shape[4];
  const long whole = h * w, quarter = (h / 2) * (w / 2);
  ROOM room;
  lay_out(work, shape, &room);
  clear_planes(&room, ci, 0);
  prepare_kernel(&room, ci, co, weight, ci, 0);
  memset(stats, 0, sizeof(double) * (size_t)(2 * co));
  for (long i = 0, some; i < n; i += some) {
    some = group(&room, n, i);
    REAL *maps = y + i * whole * co;
    enclose(&room.grid, some, ci, x + i * whole * ci, room.plane[0]);
    convolve(&room.grid, some, 1, room.plane, ci, co, room.kernels, room.inputs, room.products, maps);
    for (long k = 0; k < some; k++) {
      const long at = (i + k) * quarter * co;
      add_moments(whole, co, maps + k * whole * co, i + k, stats, stats + co);
      pool(h, w, co, maps + k * whole * co, scale, pooled + at, index + at);
    }
  }
  for (long c = 0; c < co; c++) stats[co + c] = 1 / sqrt(stats[co + c] / (double)(n * whole) + eps);
  open_channels(co, scale, stats, &room.k);
  activate(n * quarter, co, pooled, room.k.gain, room.k.mean, shift, out, index);
}

/* Spread the cotangents of a group of pictures over the first stack of planes. */
static void spread_group(const ROOM *room, long pictures, long co, const MIX *mix, const REAL *g,
                         const signed char *index, const REAL *y, const REAL *extra) {
  const GRID *grid = &room->grid;
  const long h = grid->height, w = grid->width, line = grid->stride * co;
  for (long k = 0; k < pictures; k++) {
    const long at = k * (h / 2) * (w / 2) * co, from = k * h * w * co;
    spread(h, w, co, mix, g + at, index + at, y + from, extra ? extra + from : NULL,
           room->plane[0] + k * plane_size(grid, co) + line + co, line);
  }
}

/* Cotangents of x (may be NULL), weight, scale and shift from those of the output, g, and of y, gy (may be NULL). */
EXPORT void block_backward(const long *shape, const REAL *x, const REAL *weight, const REAL *scale,
                           const REAL *y, const REAL *pooled, const signed char *index,
                           const double *stats, const REAL *g, const REAL *gy, REAL *dx, REAL *dw,
                           REAL *d_scale, REAL *d_shift, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], ci = shape[3], co = shape[4];
  const long whole = h * w, quarter = (h / 2) * (w / 2);
  ROOM room;
  lay_out(work, shape, &room);
  clear_planes(&room, co, ci);
  open_channels(co, scale, stats, &room.k);
  add_cotangents(n * quarter, co, g, pooled, index, &room.k);
  close_sums(co, (double)(n * whole), stats, &room.k);
  first_derivative(co, (double)(n * whole), stats, &room.k);
  for (long c = 0; c < co; c++) {
    d_shift[c] = (REAL)room.k.a[c];
    d_scale[c] = (REAL)room.k.b[c];
  }
  const MIX mix = {room.k.sparse, room.k.dense, room.k.constant, room.k.mean, room.k.other};
  if (dx) prepare_turned_kernel(&room, ci, co, weight);
  open_correlation(&room, ci, co);
  for (long i = 0, some; i < n; i += some) {
    some = group(&room, n, i);
    spread_group(&room, some, co, &mix, g + i * quarter * co, index + i * quarter * co, y + i * whole * co,
                 gy ? gy + i * whole * co : NULL);
    if (dx)
      convolve(&room.grid, some, 1, room.plane, co, ci, room.kernels, room.inputs, room.products,
               dx + i * whole * ci);
    enclose(&room.grid, some, ci, x + i * whole * ci, room.plane[1]);
    add_correlation(&room, some, ci, co, room.plane[1], room.plane[0]);
  }
  close_correlation(&room, ci, co, dw);
}

/* u = conv(vx, w) + conv(x, vw) for every picture, its sums, and what the index takes of it. */
static void block_tangent(const long *shape, ROOM *room, const REAL *x, const REAL *weight, const REAL *y,
                          const signed char *index, const REAL *g, const REAL *vx, const REAL *vw, REAL *u,
                          REAL *taken) {
  const long n = shape[0], h = shape[1], w = shape[2], ci = shape[3], co = shape[4];
  const long whole = h * w, quarter = (h / 2) * (w / 2);
  const int planes = (vx != NULL) + (vw != NULL);
  const REAL *source[2] = {vx ? vx : x, x}, *kernel[2] = {vx ? weight : vw, vw};
  CHANNELS *k = &room->k;
  clear_planes(room, ci, ci);
  for (int p = 0; p < planes; p++)
    prepare_kernel(room, ci, co, kernel[p], planes * ci, p * ci);
  for (long i = 0, some; i < n; i += some) {
    some = group(room, n, i);
    for (int p = 0; p < planes; p++)
      enclose(&room->grid, some, ci, source[p] + i * whole * ci, room->plane[p]);
    convolve(&room->grid, some, planes, room->plane, ci, co, room->kernels, room->inputs, room->products,
             u + i * whole * co);
    add_sums(some * whole, co, u + i * whole * co, y + i * whole * co, k->mean, NULL, k->u_mean, k->u_y);
    for (long j = i; j < i + some; j++)
      take(h, w, co, u + j * whole * co, index + j * quarter * co, taken + j * quarter * co);
    const long at = i * quarter * co;
    add_sums(some * quarter, co, g + at, taken + at, NULL, index + at, NULL, k->g_u);
  }
}

/* Cotangents of g, y, x, weight and scale from those of block_backward's results vx, vw, v_scale and v_shift,
   any of which may be NULL. dx (needs vw) and dw (needs vx) may be NULL too. */
EXPORT void block_double(const long *shape, const REAL *x, const REAL *weight, const REAL *scale,
                         const REAL *y, const REAL *pooled, const signed char *index,
                         const double *stats, const REAL *g, const REAL *vx, const REAL *vw,
                         const REAL *v_scale, const REAL *v_shift, REAL *dg, REAL *dy, REAL *dx, REAL *dw,
                         REAL *d_scale, void *work) {
  const long n = shape[0], h = shape[1], w = shape[2], ci = shape[3], co = shape[4];
  const long whole = h * w, quarter = (h / 2) * (w / 2);
  ROOM room;
  lay_out(work, shape, &room);
  open_channels(co, scale, stats, &room.k);
  add_cotangents(n * quarter, co, g, pooled, index, &room.k);
  block_tangent(shape, &room, x, weight, y, index, g, vx, vw, dy, dg);
  close_sums(co, (double)(n * whole), stats, &room.k);
  tangent_coefficients(co, scale, stats, v_scale, v_shift, &room.k);
  second_derivative(co, (double)(n * whole), scale, stats, v_scale, &room.k, d_scale);
  const MIX tangent = {NULL, room.k.sparse, room.k.offset, room.k.mean, room.k.gain};
  carry_tangent(n * quarter, co, dg, pooled, index, &tangent, dg);
  const MIX second = {room.k.sparse, room.k.dense, room.k.constant, room.k.mean, room.k.other};
  for (long i = 0; i < n; i++) {
    REAL *map = dy + i * whole * co;
    spread(h, w, co, &second, g + i * quarter * co, index + i * quarter * co, y + i * whole * co, map, map,
           w * co);
  }
  first_derivative(co, (double)(n * whole), stats, &room.k);
  const MIX first = {room.k.sparse, room.k.dense, room.k.constant, room.k.mean, room.k.other};
  clear_planes(&room, co, ci);
  if (dx) prepare_turned_kernel(&room, ci, co, vw);
  open_correlation(&room, ci, co);
  for (long i = 0, some; (dx || dw) && i < n; i += some) {
    some = group(&room, n, i);
    spread_group(&room, some, co, &first, g + i * quarter * co, index + i * quarter * co, y + i * whole * co,
                 NULL);
    if (dx)
      convolve(&room.grid, some, 1, room.plane, co, ci, room.kernels, room.inputs, room.products,
               dx + i * whole * ci);
    if (!dw) continue;
    enclose(&room.grid, some, ci, vx + i * whole * ci, room.plane[1]);
    add_correlation(&room, some, ci, co, room.plane[1], room.plane[0]);
  }
  if (dw) close_correlation(&room, ci, co, dw);
}
