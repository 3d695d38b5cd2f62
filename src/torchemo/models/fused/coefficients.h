/* Per-channel coefficients of the normalisation's first and second derivative (docs/speed-notes.md). */

/* The next piece of a workspace, on a cache line of its own; without a workspace, only its size is counted. */
static void *carve(void *work, size_t *used, size_t bytes) {
  void *here = work ? (char *)work + *used : NULL;
  *used += (bytes + 63) / 64 * 64;
  return here;
}

typedef struct {
  REAL *gain, *mean;                     /* scale r and the mean, of the forward pass */
  REAL *sparse, *dense, *constant;       /* a mix, see pooling.h */
  REAL *other, *offset;                  /* factor of u, and the constant of the tangent */
  double *a, *b, *u_mean, *u_y, *g_u;    /* sums over g, g yhat; means of u, u yhat; sum of g u */
} CHANNELS;

static void carve_channels(char *base, size_t *used, long out, CHANNELS *k) {
  REAL **narrow[7] = {&k->gain, &k->mean, &k->sparse, &k->dense, &k->constant, &k->other, &k->offset};
  double **wide[5] = {&k->a, &k->b, &k->u_mean, &k->u_y, &k->g_u};
  for (int i = 0; i < 7; i++) *narrow[i] = carve(base, used, sizeof(REAL) * (size_t)out);
  for (int i = 0; i < 5; i++) *wide[i] = carve(base, used, sizeof(double) * (size_t)out);
}

/* Gain and mean from the statistics [2, out]: means, then 1 / sqrt(var + eps). Clears the sums. */
static void open_channels(long out, const REAL *scale, const double *stats, CHANNELS *k) {
  for (long c = 0; c < out; c++) {
    k->gain[c] = (REAL)((double)scale[c] * stats[out + c]);
    k->mean[c] = (REAL)stats[c];
    k->a[c] = k->b[c] = k->u_mean[c] = k->u_y[c] = k->g_u[c] = 0;
  }
}

/* a += sum g and b += sum g (y - mean) over what was taken in `count` windows. */
static void add_cotangents(long count, long out, const REAL *g, const REAL *pooled,
                           const signed char *index, CHANNELS *k) {
  add_sums(count, out, g, pooled, k->mean, index, k->a, k->b);
}

/* From the sums to b = sum g yhat, and to the means of u and u yhat. */
static void close_sums(long out, double positions, const double *stats, CHANNELS *k) {
  for (long c = 0; c < out; c++) {
    k->b[c] *= stats[out + c];
    k->u_mean[c] /= positions;
    k->u_y[c] *= stats[out + c] / positions;
  }
}

/* dy = gain (g - a / M - yhat b / M) as a mix; a factor of one for what is added to it. */
static void first_derivative(long out, double positions, const double *stats, CHANNELS *k) {
  for (long c = 0; c < out; c++) {
    k->sparse[c] = k->gain[c];
    k->dense[c] = (REAL)(-(double)k->gain[c] * stats[out + c] * k->b[c] / positions);
    k->constant[c] = (REAL)(-(double)k->gain[c] * k->a[c] / positions);
    k->other[c] = 1;
  }
}

/* The tangent of what was taken, gain (u - mean u - yhat mean(u yhat)) + v_scale yhat + v_shift, as a mix of
   u, y and 1: `gain`, `sparse` and `offset`. */
static void tangent_coefficients(long out, const REAL *scale, const double *stats, const REAL *v_scale,
                                 const REAL *v_shift, CHANNELS *k) {
  for (long c = 0; c < out; c++) {
    const double r = stats[out + c], gain = (double)scale[c] * r;
    k->sparse[c] = (REAL)(r * ((v_scale ? (double)v_scale[c] : 0) - gain * k->u_y[c]));
    k->offset[c] = (REAL)((v_shift ? (double)v_shift[c] : 0) - gain * k->u_mean[c]);
  }
}

/* The cotangent of y as a mix of g (`sparse`, as above), y, 1 and u, and the cotangent of the scale. */
static void second_derivative(long out, double positions, const REAL *scale, const double *stats,
                              const REAL *v_scale, CHANNELS *k, REAL *d_scale) {
  for (long c = 0; c < out; c++) {
    const double r = stats[out + c], gain = (double)scale[c] * r, vs = v_scale ? (double)v_scale[c] : 0;
    const double a = k->a[c], b = k->b[c], u = k->u_mean[c], q = k->u_y[c];
    const double along = k->g_u[c] - a * u - b * q;
    const double e_mean = (vs * a - gain * (a * q + b * u)) / positions;
    const double e_y = (vs * b - 2 * gain * q * b) / positions;
    k->dense[c] = (REAL)(-r * r * (gain * along / positions + e_y));
    k->constant[c] = (REAL)(-r * e_mean);
    k->other[c] = (REAL)(-gain * r * b / positions);
    d_scale[c] = (REAL)(r * along);
  }
}
