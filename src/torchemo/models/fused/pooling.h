/* Statistics, 2x2 pooling and the passes that carry cotangents through pooling, ReLU and normalisation.
   Maps are channels-last, channels a multiple of eight. `index` says which of a window's four elements was
   taken, row by row, and NOBODY where ReLU is off. */

/* The index of a window where ReLU is off. */
#define NOBODY 4

/* Positions whose single-precision sum is moved into double precision at a time. */
#define RUN 64L

INLINE void add_to(double *sums, VEC part) {
  for (long l = 0; l < LANES; l++) sums[l] += part[l];
}

/* sum_a += sum of a, sum_ab += sum of a (b - centre), over positions that are on, for `vecs` vectors of channels.
   centre, index and sum_a may be NULL: centre 0, everything on, no plain sum. */
INLINE void add_some_sums(const int vecs, long count, long channels, const REAL *a, const REAL *b,
                          const REAL *centre, const signed char *index, double *sum_a, double *sum_ab) {
  VEC middle[4];
  for (int v = 0; v < vecs; v++) middle[v] = centre ? load(centre + v * LANES) : (VEC){0};
  for (long begin = 0; begin < count; begin += RUN) {
    const long end = begin + RUN < count ? begin + RUN : count;
    VEC one[4] = {{0}}, two[4] = {{0}};
    for (long p = begin; p < end; p++)
      for (int v = 0; v < vecs; v++) {
        const long at = p * channels + v * LANES;
        VEC value = load(a + at);
        if (index) value = keep(load_index(index + at) != NOBODY, value);
        one[v] += value;
        two[v] += value * (load(b + at) - middle[v]);
      }
    for (int v = 0; v < vecs; v++) {
      if (sum_a) add_to(sum_a + v * LANES, one[v]);
      add_to(sum_ab + v * LANES, two[v]);
    }
  }
}

/* The same for all channels, a cache line or two of them at a time. */
INLINE void add_sums(long count, long channels, const REAL *a, const REAL *b, const REAL *centre,
                     const signed char *index, double *sum_a, double *sum_ab) {
  long c = 0;
  for (; c + 4 * LANES <= channels; c += 4 * LANES)
    add_some_sums(4, count, channels, a + c, b + c, centre ? centre + c : NULL, index ? index + c : NULL,
                  sum_a ? sum_a + c : NULL, sum_ab + c);
  for (; c < channels; c += LANES)
    add_some_sums(1, count, channels, a + c, b + c, centre ? centre + c : NULL, index ? index + c : NULL,
                  sum_a ? sum_a + c : NULL, sum_ab + c);
}

/* sums += sum of (y - centre) to the given power, one or two. */
INLINE void add_powers(const int vecs, const int power, long count, long channels, const REAL *y,
                       const REAL *centre, double *sums) {
  VEC middle[4];
  for (int v = 0; v < vecs; v++) middle[v] = load(centre + v * LANES);
  for (long begin = 0; begin < count; begin += RUN) {
    const long end = begin + RUN < count ? begin + RUN : count;
    VEC part[4] = {{0}};
    for (long p = begin; p < end; p++)
      for (int v = 0; v < vecs; v++) {
        const VEC away = load(y + p * channels + v * LANES) - middle[v];
        part[v] += power == 2 ? away * away : away;
      }
    for (int v = 0; v < vecs; v++) add_to(sums + v * LANES, part[v]);
  }
}

/* Merge the mean and the summed squares about it of one picture into those of the `before` pictures already
   seen, for `vecs` vectors of channels. The picture's own squares are taken about its own mean. */
INLINE void add_some_moments(const int vecs, long count, long channels, const REAL *y, long before,
                             double *mean, double *squares) {
  REAL middle[4 * 32 / sizeof(REAL)] = {0};
  double sum[4 * 32 / sizeof(REAL)] = {0}, square[4 * 32 / sizeof(REAL)] = {0};
  add_powers(vecs, 1, count, channels, y, middle, sum);
  for (long l = 0; l < vecs * LANES; l++) middle[l] = (REAL)(sum[l] / (double)count);
  add_powers(vecs, 2, count, channels, y, middle, square);
  for (long l = 0; l < vecs * LANES; l++) {
    const double own = sum[l] / (double)count, off = own - (double)middle[l], gap = own - mean[l];
    const double share = (double)before / (double)(before + 1);
    squares[l] += square[l] + (double)count * (gap * gap * share - off * off);
    mean[l] += gap / (double)(before + 1);
  }
}

static void add_moments(long count, long channels, const REAL *y, long before, double *mean,
                        double *squares) {
  long c = 0;
  for (; c + 4 * LANES <= channels; c += 4 * LANES)
    add_some_moments(4, count, channels, y + c, before, mean + c, squares + c);
  for (; c < channels; c += LANES)
    add_some_moments(1, count, channels, y + c, before, mean + c, squares + c);
}

/* Take from every window the element that will be largest after normalisation: the largest where the scale is
   positive, the smallest where it is negative, the first one where it is zero or several are equal. */
static void pool(long height, long width, long channels, const REAL *y, const REAL *scale, REAL *pooled,
                 signed char *index) {
  const long line = width * channels;
  for (long i = 0; i < height / 2; i++)
    for (long j = 0; j < width / 2; j++) {
      const REAL *window = y + 2 * i * line + 2 * j * channels;
      const long at = (i * (width / 2) + j) * channels;
      for (long c = 0; c < channels; c += LANES) {
        const VEC s = load(scale + c), one = all(1);
        const VEC sign = keep(s > 0, one) - keep(s < 0, one);
        const long places[4] = {0, channels, line, line + channels};
        VEC taken = load(window + c), best = sign * taken;
        MASK which = {0};
        for (int k = 1; k < 4; k++) {
          const VEC value = load(window + places[k] + c), signed_value = sign * value;
          const MASK better = signed_value > best;
          best = where(better, signed_value, best);
          taken = where(better, value, taken);
          which = (better & k) | (~better & which);
        }
        store(pooled + at + c, taken);
        store_index(index + at + c, which);
      }
    }
}

/* out = relu(gain (pooled - mean) + shift), and NOBODY into the index where ReLU is off. NaN stays NaN. */
static void activate(long count, long channels, const REAL *pooled, const REAL *gain, const REAL *mean,
                     const REAL *shift, REAL *out, signed char *index) {
  for (long p = 0; p < count; p++)
    for (long c = 0; c < channels; c += LANES) {
      const long at = p * channels + c;
      const VEC z = (load(pooled + at) - load(mean + c)) * load(gain + c) + load(shift + c);
      const MASK off = z <= 0, which = load_index(index + at);
      store(out + at, keep(~off, z));
      store_index(index + at, (off & NOBODY) | (~off & which));
    }
}

/* What a map's element gets: sparse g where it was taken, + dense (y - mean) + constant, + extra_factor extra. */
typedef struct {
  const REAL *sparse, *dense, *constant, *mean, *extra_factor;
} MIX;

INLINE VEC mixed(const MIX *k, long c, const REAL *y, const REAL *extra) {
  VEC value = (load(y) - load(k->mean + c)) * load(k->dense + c) + load(k->constant + c);
  if (extra) value += load(k->extra_factor + c) * load(extra);
  return value;
}

/* Write the mix for a whole map; `to` may be the map `extra` itself. */
static void spread(long height, long width, long channels, const MIX *k, const REAL *g,
                   const signed char *index, const REAL *y, const REAL *extra, REAL *to, long to_line) {
  const long line = width * channels;
  for (long i = 0; i < height; i++) {
    const int pooled_row = i / 2 < height / 2;
    for (long j = 0; j < width; j++) {
      const int pooled = pooled_row && j / 2 < width / 2;
      const long window = ((i / 2) * (width / 2) + j / 2) * channels;
      const long from = i * line + j * channels;
      const WORD place = (WORD)(2 * (i % 2) + j % 2);
      for (long c = 0; c < channels; c += LANES) {
        VEC value = mixed(k, c, y + from + c, extra ? extra + from + c : NULL);
        if (pooled) {
          const MASK here = load_index(index + window + c) == place;
          value += keep(here, load(k->sparse + c) * load(g + window + c));
        }
        store(to + i * to_line + j * channels + c, value);
      }
    }
  }
}

/* taken = the element of every window that the index names; zero where there is NOBODY. */
static void take(long height, long width, long channels, const REAL *map, const signed char *index,
                 REAL *taken) {
  const long line = width * channels;
  for (long i = 0; i < height / 2; i++)
    for (long j = 0; j < width / 2; j++) {
      const REAL *window = map + 2 * i * line + 2 * j * channels;
      const long at = (i * (width / 2) + j) * channels;
      const long places[4] = {0, channels, line, line + channels};
      for (long c = 0; c < channels; c += LANES) {
        const MASK which = load_index(index + at + c);
        VEC value = {0};
        for (int k = 0; k < 4; k++) value += keep(which == k, load(window + places[k] + c));
        store(taken + at + c, value);
      }
    }
}

/* to = factor (taken - centre) + slope (pooled - mean) + offset where ReLU is on, else zero; `to` may be `taken`. */
static void carry_tangent(long count, long channels, const REAL *taken, const REAL *pooled,
                          const signed char *index, const MIX *k, REAL *to) {
  for (long p = 0; p < count; p++)
    for (long c = 0; c < channels; c += LANES) {
      const long at = p * channels + c;
      const VEC value = load(k->extra_factor + c) * load(taken + at) +
                        (load(pooled + at) - load(k->mean + c)) * load(k->dense + c) +
                        load(k->constant + c);
      store(to + at, keep(load_index(index + at) != NOBODY, value));
    }
}

/* to = factor g where ReLU is on, else zero, plus `more` (or NULL). */
static void scale_taken(long count, long channels, const REAL *factor, const REAL *g,
                        const signed char *index, const REAL *more, REAL *to) {
  for (long p = 0; p < count; p++)
    for (long c = 0; c < channels; c += LANES) {
      const long at = p * channels + c;
      VEC value = load(factor + c) * load(g + at);
      value = keep(load_index(index + at) != NOBODY, value);
      store(to + at, more ? value + load(more + at) : value);
    }
}
