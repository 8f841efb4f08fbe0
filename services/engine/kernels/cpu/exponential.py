"""2**x of vectors: a polynomial of the fractional part, times a power of two.

Both polynomials have the least relative error for their degree, found by Lawson's algorithm.
"""

import math
from typing import Any

import numpy as np
from numba import float32

from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.vectors import above_whole, divide, multiply_add, spread, times_power

LOG2_E = math.log2(math.e)

# Coefficients of rising powers of f, the first for f in [-0.5, 0.5] with an error of 2e-7, the second for f in [0, 1)
# with 1e-4, a twentieth of bfloat16's resolution.
_AROUND_WHOLE = tuple(map(np.float32, (1.00000007, 0.693146967, 0.240221197, 0.0555071328, 0.0096755415, 0.0013276472)))
_ABOVE_WHOLE = tuple(map(np.float32, (0.99992522, 0.69583354, 0.22606716, 0.07802452)))


@njit
def exp2(x: Any) -> Any:
    """Returns 2**x with a relative error of 2e-7.

    Results too small for float32 become 0 or a number close to 0, results too large a large number or infinity.
    """
    shifted = x + spread(float32(0.5))
    f = above_whole(shifted) - spread(float32(0.5))
    y = multiply_add(spread(_AROUND_WHOLE[5]), f, spread(_AROUND_WHOLE[4]))
    for i in range(3, -1, -1):
        y = multiply_add(y, f, spread(_AROUND_WHOLE[i]))
    return times_power(y, shifted)


@njit
def exp2_for_bfloat16(x: Any) -> Any:
    """Returns 2**x with a relative error of 1e-4, in less time than `exp2`."""
    f = above_whole(x)
    y = multiply_add(spread(_ABOVE_WHOLE[3]), f, spread(_ABOVE_WHOLE[2]))
    y = multiply_add(y, f, spread(_ABOVE_WHOLE[1]))
    y = multiply_add(y, f, spread(_ABOVE_WHOLE[0]))
    return times_power(y, x)


@njit(error_model="numpy")
def silu(x: Any) -> Any:
    """Returns x / (1 + e**-x)."""
    return divide(x, spread(float32(1)) + exp2(x * spread(float32(-LOG2_E))))
