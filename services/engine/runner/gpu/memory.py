"""How much of a GPU's memory its pool of KV blocks gets: what is left when weights and the largest step have theirs."""

from dataclasses import dataclass

from services.protocol.model_files.base import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """Bytes of a card, when the model's weights are on it."""

    total: int
    free: int
    own: int  # that this process has allocated so far; what CUDA takes for itself is in no fraction
    step: int  # that its largest step takes beyond this


def kv_budget(card: CardMemory, *, fraction: float, asked: int | None) -> int:
    """Bytes for the pool: as asked, else what is left of this process's `fraction` of the card. Raises ModelError.

    Others on the card (a second worker, a display) count only where less is free than that.
    """
    free = card.free - card.step
    if asked is not None:
        if asked > free:
            raise ModelError(f"the KV pool needs {_gib(asked)}, {_gib(free)} of {_gib(card.total)} are left on the GPU")
        return asked
    left = min(int(fraction * card.total) - card.own - card.step, free)
    if left <= 0:
        raise ModelError(
            f"no memory is left for KV: this worker may take {fraction:.0%} of {_gib(card.total)}, weights "
            f"take {_gib(card.own)}, the largest step {_gib(card.step)}, and {_gib(card.free)} are free"
        )
    return left


def check_weights_fit(needed: int, free: int) -> None:
    """Raises ModelError where the weights alone are more than is free."""
    if needed > free:
        raise ModelError(f"the model's weights need {_gib(needed)}, {_gib(free)} are free on the GPU")


def _gib(num_bytes: int) -> str:
    return f"{max(num_bytes, 0) / 2**30:.2f} GiB"
