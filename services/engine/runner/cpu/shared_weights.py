"""Weights that the processes of one user on one host share: the first one packs them, the others map what it has.

    name ──▶ lock its file ──▶ somebody has all of them ───────────────────────▶ map
                 │                      │ nobody
                 │ locked: wait         └──▶ pack into a file without a name ──▶ seal ──▶ map, and tell the others
                 │ until it is not
                 └──▶ whoever packs stands still, or there is no such memory here ──▶ NotSharedError: memory of its own

Whoever packed maps the same as the others in the end. `shared_file` says why a file that is not complete is never
mapped, `weight_holders` how processes find each other, `weight_image` what is in the file.
"""

import atexit
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.matmul import WEIGHTS
from services.engine.kernels.cpu.shared_file import Mapping, SharedFile, SharedFileError, image_of
from services.engine.runner.cpu.weight_holders import Holder, HolderFile, NotSharedError, WeightHolders, host_digest
from services.engine.runner.cpu.weight_image import ImageError, code_digest, image_bytes, weights_of
from services.engine.runner.progress import Progress

_PATIENCE_S = 60.0  # for a process that packs, without a byte more: one tensor is read and packed in less
_MAPPING = "mapping the weights of process"
_WAITING = "waiting for weights that are packed by process"


@dataclass(frozen=True, slots=True, eq=False)
class SharedWeights:
    """Weights in memory that other processes may map."""

    weights: Any  # what `pack` returned, with its tensors in this memory
    num_bytes: int
    is_own: bool  # this process packed them


def name_of(*facts: object) -> str:
    """Returns the name of weights that depend on these facts, on this host, this user, this processor and this code.

    Raises NotSharedError if the system does not tell of itself.
    """
    versions = torch.__version__, np.__version__, sys.version
    return sha256(repr((host_digest(), ISA.name, versions, code_digest(), facts)).encode()).hexdigest()[:32]


def share_weights(
    name: str,
    pack: Callable[[], Any],
    progress: Progress,
    holders: WeightHolders | None = None,
    patience_s: float = _PATIENCE_S,
) -> SharedWeights:
    """Maps the weights of this name, or packs them for others to map. Raises NotSharedError where that cannot be.

    pack: reads weights; called if nobody has them. It may have been called when this raises NotSharedError; its own
    errors come through. Memory of `WEIGHTS` is shared meanwhile.
    """
    holders = WeightHolders() if holders is None else holders
    with holders.locked(name, patience_s=patience_s, tell=_Waiting(progress).tell) as file:
        try:
            found = file.complete()
            shared = _pack(file, pack) if found is None else _map(file, found, progress)
        except (SharedFileError, ImageError) as error:
            raise NotSharedError(str(error)) from error
        except OSError as error:
            raise NotSharedError(f"{error.strerror or error}") from error
    atexit.register(holders.leave, name)
    return shared


def _pack(holders: HolderFile, pack: Callable[[], Any]) -> SharedWeights:
    file = SharedFile()
    holders.add(Holder.of_this_process(file.file))  # so that others see how far it is; they cannot map it yet
    with WEIGHTS.elsewhere(file.take):
        weights = pack()
    image = image_bytes(weights, file)
    del weights  # of which nothing may be in use when the file is sealed
    mapping = file.finish(image, holders.name)
    return _held(holders, mapping, is_own=True)


def _map(holders: HolderFile, mapping: Mapping, progress: Progress) -> SharedWeights:
    progress.stage(f"{_MAPPING} {', '.join(str(each.pid) for each in holders.holders())}", mapping.num_bytes)
    shared = _held(holders, mapping, is_own=False)
    progress.advance(mapping.num_bytes)
    return shared


def _held(holders: HolderFile, mapping: Mapping, *, is_own: bool) -> SharedWeights:
    weights = weights_of(image_of(mapping), mapping)
    holders.add(Holder.of_this_process(mapping.file))
    return SharedWeights(weights, mapping.num_bytes, is_own)


class _Waiting:
    """Tells a person whom this process waits for, once, and how far that one is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._pid: int | None = None

    def tell(self, pid: int, num_bytes: int) -> None:
        """Hears of the process that packs, and of bytes that have come."""
        if pid != self._pid:
            self._pid = pid
            self._progress.stage(f"{_WAITING} {pid}")
        self._progress.advance(num_bytes)
