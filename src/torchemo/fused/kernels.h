/* All kernels in one precision, in the order of their dependence. */

#include "vectors.h"
#include "winograd.h"
#include "pooling.h"
#include "coefficients.h"
#include "patches.h"
#include "block.h"
#include "first.h"
