/* 3x3 same convolution and its weight gradient by Winograd's F(2x2, 3x3): a 2x2 patch of outputs costs 16
   multiplications per pair of channels instead of 36. Output patches coincide with pooling windows.

     Y = A^T [ (G w G^T) . (B^T x B) ] A          dw = G^T [ (B^T x B) . (A dY A^T) ] G

   Maps are channels-last; convolved maps lie in planes with a border of zeros and an even inside.
   Flat regions give products that are exactly zero, so outputs that are equal by symmetry stay equal. */

/* Tiles that are transformed and multiplied at a time: their 16 products stay in the second-level cache. */
#define BLOCK 48L
/* Elements from one of the 16 layers of a block to the next; the odd lines keep them in different cache sets. */
#define LAYER(width) (BLOCK * (width) + 16)

typedef struct {
  long height, width;   /* of the maps */
  long rows, cols;      /* 2x2 tiles, the last ones half outside when a side is odd */
  long stride, lines;   /* of a plane: elements per channel in a line, and lines */
  long pictures;        /* that are convolved together, so that small maps fill a block too */
} GRID;

INLINE GRID grid_of(long pictures, long height, long width) {
  const long rows = (height + 1) / 2, cols = (width + 1) / 2, fit = 4 * BLOCK / (rows * cols);
  const long some = fit < pictures ? fit : pictures;
  return (GRID){height, width, rows, cols, 2 * cols + 2, 2 * rows + 2, some < 1 ? 1 : some};
}

INLINE long plane_size(const GRID *g, long channels) { return g->stride * g->lines * channels; }

/* Where a tile of a group of pictures is. */
typedef struct {
  long picture, row, col;
} PLACE;

INLINE PLACE place_of(const GRID *g, long tile) {
  const long tiles = g->rows * g->cols;
  return (PLACE){tile / tiles, tile % tiles / g->cols, tile % g->cols};
}

INLINE void advance(const GRID *g, PLACE *at) {
  if (++at->col < g->cols) return;
  at->col = 0;
  if (++at->row < g->rows) return;
  at->row = 0;
  at->picture++;
}

/* Put maps into the inside of planes whose border is zero already. */
static void enclose(const GRID *g, long pictures, long channels, const REAL *map, REAL *plane) {
  for (long k = 0; k < pictures; k++)
    for (long i = 0; i < g->height; i++)
      memcpy(plane + ((k * g->lines + i + 1) * g->stride + 1) * channels,
             map + (k * g->height + i) * g->width * channels, (size_t)(g->width * channels) * sizeof(REAL));
}

/* taps[t, i, o] = w[o, i, t], or with `turned` taps[t, o, i] of the kernel turned by 180 degrees. */
static void gather_taps(long out, long in, const REAL *w, int turned, REAL *taps) {
  const long size = in * out, outer = turned ? out : in, inner = turned ? in : out;
  const long outer_step = turned ? 9 * in : 9, inner_step = turned ? 9 : 9 * in;
  for (long a = 0; a < outer; a++)
    for (long b = 0; b < inner; b++) {
      const REAL *kernel = w + a * outer_step + b * inner_step;
      for (int t = 0; t < 9; t++) taps[t * size + a * inner + b] = kernel[turned ? 8 - t : t];
    }
}

/* U[f] = (G taps G^T)[f] for `rows` x `cols` kernels; rows of U begin at row `first` of `depth`. */
static void transform_kernel(long rows, long cols, const REAL *taps, long depth, long first, REAL *u) {
  const long size = rows * cols;
  const REAL half = (REAL)0.5;
  for (long at = 0; at < size; at += LANES) {
    VEC tall[4][3];
    for (int x = 0; x < 3; x++) {
      const VEC top = load(taps + x * size + at), middle = load(taps + (3 + x) * size + at);
      const VEC low = load(taps + (6 + x) * size + at);
      tall[0][x] = top;
      tall[1][x] = half * (top + middle + low);
      tall[2][x] = half * (top - middle + low);
      tall[3][x] = low;
    }
    for (int y = 0; y < 4; y++) {
      const VEC *t = tall[y];
      REAL *to = u + (4 * y * depth + first) * cols + at;
      store(to, t[0]);
      store(to + depth * cols, half * (t[0] + t[1] + t[2]));
      store(to + 2 * depth * cols, half * (t[0] - t[1] + t[2]));
      store(to + 3 * depth * cols, t[2]);
    }
  }
}

/* V[f, t, c] = (B^T x B)[f] for `count` tiles from `first` on; rows of V are `depth` wide. */
static void transform_inputs(const GRID *g, long channels, const REAL *plane, long first, long count,
                             long depth, REAL *v) {
  const long line = g->stride * channels, layer = LAYER(depth);
  PLACE at = place_of(g, first);
  for (long t = 0; t < count; t++, advance(g, &at)) {
    const REAL *from = plane + ((at.picture * g->lines + 2 * at.row) * g->stride + 2 * at.col) * channels;
    for (long c = 0; c < channels; c += LANES) {
      VEC half[4][4];
      for (int x = 0; x < 4; x++) {
        const REAL *p = from + x * channels + c;
        const VEC a = load(p), b = load(p + line), d = load(p + 2 * line);
        half[0][x] = a - d;
        half[1][x] = b + d;
        half[2][x] = d - b;
        half[3][x] = b - load(p + 3 * line);
      }
      REAL *to = v + t * depth + c;
      for (int y = 0; y < 4; y++) {
        store(to + (4 * y) * layer, half[y][0] - half[y][2]);
        store(to + (4 * y + 1) * layer, half[y][1] + half[y][2]);
        store(to + (4 * y + 2) * layer, half[y][2] - half[y][1]);
        store(to + (4 * y + 3) * layer, half[y][1] - half[y][3]);
      }
    }
  }
}

/* D[f, t, c] = (A dY A^T)[f] for the tiles of a plane of cotangents. */
static void transform_cotangents(const GRID *g, long channels, const REAL *plane, long first, long count,
                                 REAL *d) {
  const long line = g->stride * channels, layer = LAYER(channels);
  PLACE at = place_of(g, first);
  for (long t = 0; t < count; t++, advance(g, &at)) {
    const REAL *from = plane + ((at.picture * g->lines + 2 * at.row + 1) * g->stride + 2 * at.col + 1) * channels;
    for (long c = 0; c < channels; c += LANES) {
      VEC half[4][2];
      for (int x = 0; x < 2; x++) {
        const VEC a = load(from + x * channels + c), b = load(from + x * channels + line + c);
        half[0][x] = a;
        half[1][x] = a + b;
        half[2][x] = a - b;
        half[3][x] = -b;
      }
      REAL *to = d + t * channels + c;
      for (int y = 0; y < 4; y++) {
        store(to + (4 * y) * layer, half[y][0]);
        store(to + (4 * y + 1) * layer, half[y][0] + half[y][1]);
        store(to + (4 * y + 2) * layer, half[y][0] - half[y][1]);
        store(to + (4 * y + 3) * layer, -half[y][1]);
      }
    }
  }
}

/* Y = A^T M A for a block of tiles; what lies outside the map is left out. */
static void transform_outputs(const GRID *g, long channels, const REAL *m, long first, long count,
                              REAL *map) {
  const long line = g->width * channels, layer = LAYER(channels);
  PLACE at = place_of(g, first);
  for (long t = 0; t < count; t++, advance(g, &at)) {
    const int below = 2 * at.row + 1 < g->height, beside = 2 * at.col + 1 < g->width;
    REAL *to = map + ((at.picture * g->height + 2 * at.row) * g->width + 2 * at.col) * channels;
    for (long c = 0; c < channels; c += LANES) {
      const REAL *from = m + t * channels + c;
      VEC half[2][4];
      for (int x = 0; x < 4; x++) {
        const VEC b = load(from + (4 + x) * layer), d = load(from + (8 + x) * layer);
        half[0][x] = load(from + x * layer) + b + d;
        half[1][x] = b - d - load(from + (12 + x) * layer);
      }
      store(to + c, half[0][0] + half[0][1] + half[0][2]);
      if (beside) store(to + channels + c, half[0][1] - half[0][2] - half[0][3]);
      if (below) store(to + line + c, half[1][0] + half[1][1] + half[1][2]);
      if (below && beside) store(to + line + channels + c, half[1][1] - half[1][2] - half[1][3]);
    }
  }
}

/* maps = sum over one or two stacks of planes of conv(plane, kernel), for a group of pictures; U holds the kernels'
   rows one below the other. */
static void convolve(const GRID *g, long pictures, int planes, REAL *const *plane, long in, long out,
                     const REAL *u, REAL *v, REAL *m, REAL *map) {
  const long tiles = pictures * g->rows * g->cols, depth = planes * in;
  for (long first = 0; first < tiles; first += BLOCK) {
    const long count = tiles - first < BLOCK ? tiles - first : BLOCK;
    for (int p = 0; p < planes; p++)
      transform_inputs(g, in, plane[p], first, count, depth, v + p * in);
    for (int f = 0; f < 16; f++)
      product(count, depth, out, v + f * LAYER(depth), depth, u + f * depth * out, m + f * LAYER(out));
    transform_outputs(g, out, m, first, count, map);
  }
}

/* sums[f, i, o] += sum over tiles of (B^T x B)[f, i] (A dY A^T)[f, o]. */
static void correlate(const GRID *g, long pictures, long in, long out, const REAL *x, const REAL *dy,
                      REAL *v, REAL *m, REAL *sums) {
  const long tiles = pictures * g->rows * g->cols;
  for (long first = 0; first < tiles; first += BLOCK) {
    const long count = tiles - first < BLOCK ? tiles - first : BLOCK;
    transform_inputs(g, in, x, first, count, in, v);
    transform_cotangents(g, out, dy, first, count, m);
    for (int f = 0; f < 16; f++)
      add_outer(in, count, out, v + f * LAYER(in), m + f * LAYER(out), sums + f * in * out);
  }
}

/* dw[o, i] = G^T sums[:, i, o] G, by way of taps[t, i, o]. */
static void kernel_gradient(long out, long in, const REAL *sums, REAL *taps, REAL *dw) {
  const long size = in * out;
  const REAL half = (REAL)0.5;
  for (long at = 0; at < size; at += LANES) {
    VEC tall[3][4];
    for (int x = 0; x < 4; x++) {
      const VEC b = load(sums + (4 + x) * size + at), c = load(sums + (8 + x) * size + at);
      tall[0][x] = load(sums + x * size + at) + half * (b + c);
      tall[1][x] = half * (b - c);
      tall[2][x] = half * (b + c) + load(sums + (12 + x) * size + at);
    }
    for (int y = 0; y < 3; y++) {
      const VEC *t = tall[y];
      store(taps + 3 * y * size + at, t[0] + half * (t[1] + t[2]));
      store(taps + (3 * y + 1) * size + at, half * (t[1] - t[2]));
      store(taps + (3 * y + 2) * size + at, half * (t[1] + t[2]) + t[3]);
    }
  }
  for (long o = 0; o < out; o++)
    for (long i = 0; i < in; i++)
      for (int t = 0; t < 9; t++) dw[(o * in + i) * 9 + t] = taps[t * size + i * out + o];
}
