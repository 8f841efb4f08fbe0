"""The randomness of sampling: one exponential number for each token, a pure function of (seed, position, token id).

SplitMix64 (Steele, Lea and Flood 2014), as in `sampler.uniforms`: seed and position pick an output of a stream. That
output is the start of another stream, whose n-th output belongs to token n - 1.
"""

import triton
import triton.language as tl

_STEP = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def stream_of(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Returns the start of the tokens' stream, uint64, for int64 `seed` (the bits of a uint64) and `position`."""
    step = tl.full((), _STEP, tl.uint64)
    start = _mix(seed.to(tl.uint64, bitcast=True) + step)
    return _mix(start + step * (position.to(tl.uint64, bitcast=True) + 1))


@triton.jit
def exponential(stream: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Returns exponentially distributed float32 with mean 1 for each of the int32 `tokens`, from 2**-33 to 22.9.

    The number is -log(1 - v) for v = (n + 1/2) / 2**32, where n are the upper 32 bits of the token's output. The
    smaller one of v and 1 - v is computed from an integer, so that each is accurate next to 0; for small v the
    logarithm's series takes the place of a difference to 1. The relative error is below 2e-6.
    """
    numbers = (_mix(stream + tl.full((), _STEP, tl.uint64) * (tokens + 1).to(tl.uint64)) >> 32).to(tl.uint32)
    smaller = tl.minimum(numbers, numbers ^ 0xFFFFFFFF)
    v = (smaller.to(tl.float32) + 0.5) * 2.0**-32
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5)))))
    is_low = numbers == smaller
    return tl.where(is_low & (v < 1 / 32), series, -tl.log(tl.where(is_low, 1 - v, v)))


@triton.jit
def _mix(values: tl.tensor) -> tl.tensor:
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return values ^ (values >> 31)
