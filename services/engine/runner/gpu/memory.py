"""The share of a GPU's memory for the pool of KV blocks: the rest beside weights and the largest step."""

from dataclasses import dataclass

from services.protocol.model_files.base import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """Bytes of a card, when the model's weights are on it."""

    total: int
    free: int
    own: int  # allocated by this process so far; no fraction includes CUDA's own memory
    step: int  # taken by its largest step in addition


def kv_budget(card: CardMemory, *, fraction: float, asked: int | None) -> int:
    """Returns the bytes for the pool: as asked, else the rest of this process's `fraction` of the card. Raises
    ModelError.

    Other processes on the card (a second worker, a display) matter only if less memory is free than that.
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
    """Raises ModelError if the weights alone are larger than the free memory."""
    if needed > free:
        raise ModelError(f"the model's weights need {_gib(needed)}, {_gib(free)} are free on the GPU")


def _gib(num_bytes: int) -> str:
    return f"{max(num_bytes, 0) / 2**30:.2f} GiB"
