"""2**x of vectors: a polynomial of the fractional part, times a power of two; and functions made of it.

All polynomials have the least relative error for their degree, found by Lawson's algorithm.
"""

import math
from typing import Any

import numpy as np
from numba import float32

from services.engine.kernels.cpu.intrinsics import njit
from services.engine.kernels.cpu.vectors import (
    above_whole,
    divide,
    multiply_add,
    spread,
    times_power,
    where_above,
)

LOG2_E = math.log2(math.e)

# Coefficients of rising powers of f, the first for f in [-0.5, 0.5] with an error of 2e-7, the second for f in [0, 1)
# with 1e-4, a twentieth of bfloat16's resolution.
_AROUND_WHOLE = tuple(map(np.float32, (1.00000007, 0.693146967, 0.240221197, 0.0555071328, 0.0096755415, 0.0013276472)))
_ABOVE_WHOLE = tuple(map(np.float32, (0.99992522, 0.69583354, 0.22606716, 0.07802452)))


# tanh(x) / x by rising powers of x * x, for x in [-0.52, 0.52], with an error of 2e-8.
_TANH = tuple(map(np.float32, (1.0, -0.333329797, 0.133227468, -0.0528407507, 0.0168163758)))
_SQUARE_OF_HALF = float32(0.25)
_GELU = tuple(map(np.float32, (-2 * LOG2_E * math.sqrt(2 / math.pi), 0.044715)))


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


@njit(error_model="numpy")
def gelu_tanh(x: Any) -> Any:
    """Returns x (1 + tanh(u)) / 2, which is x / (1 + e**(-2 u)), with u = sqrt(2 / pi) (x + 0.044715 x**3)
    (Hendrycks and Gimpel 2016, arXiv 1606.08415).
    """
    cubic = multiply_add(x * x * x, spread(_GELU[1]), x)
    return divide(x, spread(float32(1)) + exp2(cubic * spread(_GELU[0])))


@njit(error_model="numpy")
def tanh(x: Any) -> Any:
    """Returns tanh(x) with a relative error of 3e-7."""
    square = x * x
    y = spread(_TANH[4])
    for i in range(3, -1, -1):
        y = multiply_add(y, square, spread(_TANH[i]))
    one = spread(float32(1))
    far = one - divide(spread(float32(2)), one + exp2(x * spread(float32(2 * LOG2_E))))
    return where_above(square, spread(_SQUARE_OF_HALF), far, x * y)


@njit
def capped_score(score: Any, scale: Any, cap: Any) -> Any:
    """Returns cap * tanh(score * scale / cap): a score times the scale, which stays between -cap and cap."""
    return cap * tanh(score * divide(scale, cap))
