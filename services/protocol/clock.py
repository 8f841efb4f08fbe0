"""Clocks of two processes: how far apart they are for certain, though the answer took its time."""


def certain_lead_s(told: tuple[float, float], here: tuple[float, float]) -> float:
    """Returns the seconds by which another clock is ahead of this one at least; below 0: behind; 0: they may agree.

    told: earliest and latest time that the other clock may have had; here: this clock's before and after the question.
    All are UNIX times in seconds.
    """
    return max(told[0] - here[1], 0.0) or min(told[1] - here[0], 0.0)
