"""Arrivals: when each request of an open loop is due, in seconds after the start."""

from collections.abc import Iterator

import numpy as np

_AT_ONCE = 1024  # gaps that are drawn together, where nobody knows how many there will be


def arrivals(rate: float, burstiness: float, number: int | None, random: np.random.Generator) -> Iterator[float]:
    """Draws times with gaps of a gamma distribution: its shape is `burstiness`, its mean 1 / `rate`.

    number: so many times, the last of which is number / rate: their rate is exactly that. None: without an end.
    """
    scale = 1 / (rate * burstiness)
    if number is not None:
        times = random.gamma(burstiness, scale, number).cumsum()
        yield from (times * (number / rate / times[-1])).tolist()
        return
    last = 0.0
    while True:
        times = last + random.gamma(burstiness, scale, _AT_ONCE).cumsum()
        yield from times.tolist()
        last = float(times[-1])
