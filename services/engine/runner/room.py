"""Refuses workers for which this machine has no room beside those that run, before one is started.

python -m services.engine.runner.room     says why on stderr, with exit code 1; its configuration is its parent's

On a GPU a worker takes the share that was dealt out when `baton up` began: one that was retired leaves room for
another, and a GPU that the workers of the start share fully has none for one more.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.config import DeviceKind
from services.config.engine import EngineConfig, RoomConfig
from services.config.option import Refusal
from services.engine.models.architectures import num_parameters, parse_model_config
from services.engine.runner.model_check import check_memory
from services.process import child_config, lifeline
from services.protocol.model_files.base import ModelError, naming
from services.protocol.model_files.open import open_model

if TYPE_CHECKING:
    from services.engine.runner.load_plan import LoadPlan


@dataclass(frozen=True, slots=True)
class Card:
    """Bytes of a GPU's memory."""

    number: int
    free: int
    total: int


def check_room(engine: EngineConfig, indexes: Sequence[int]) -> None:
    """Raises ModelError where there is no room for workers with these indexes. Loads torch, but not for the CPU."""
    plans: list[LoadPlan] = []
    if engine.device is not DeviceKind.CPU:
        from services.engine.runner.load_plan import plan_load  # torch takes seconds

        plans = [plan_load(replace(engine, worker_index=index)) for index in indexes]
    by_card: defaultdict[int, list[LoadPlan]] = defaultdict(list)
    for plan in plans:
        if plan.device.type == "cuda":
            by_card[plan.device.index].append(plan)
    if not by_card:
        files = open_model(engine.model)
        with naming(files):
            config = parse_model_config(files.config())
        check_memory(engine, config, len(indexes), one_alone="One more has room")
    for number, here in by_card.items():
        card = _card(number)
        check_card(card, [needed_bytes(plan, card.total) for plan in here])


def needed_bytes(plan: "LoadPlan", total: int) -> int:
    """Returns what a worker takes of a card of `total` bytes: its share, or its weights and the asked KV."""
    weights: int = num_parameters(plan.config) * plan.dtype.itemsize
    asked = plan.engine.kv_memory_bytes
    return max(weights, int(plan.gpu_memory_fraction * total)) if asked is None else weights + asked


def check_card(card: Card, needed: Sequence[int]) -> None:
    """Raises ModelError where the workers that need so many bytes each do not fit into what is free of the card."""
    if sum(needed) > card.free:
        sizes = " and ".join(_gib(each) for each in needed)
        raise ModelError(
            f"GPU {card.number} has {_gib(card.free)} of {_gib(card.total)} free, and {sizes} are needed. The workers "
            "that `baton up` began with share its memory: end one of them first, or begin with more workers or a "
            "smaller --gpu-memory-fraction"
        )


def _card(number: int) -> Card:
    import torch

    free, total = torch.cuda.mem_get_info(number)
    return Card(number, free, total)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def main() -> None:
    """Checks the room for the workers that the parent names."""
    lifeline.hold()
    try:
        config = child_config.take(RoomConfig)
        check_room(config.engine, config.indexes)
    except (ModelError, Refusal) as refused:
        sys.exit(f"baton: {refused}")


if __name__ == "__main__":
    main()
