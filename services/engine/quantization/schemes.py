"""Ways in which checkpoints store quantized layers, as the settings of config.json tell them. Nothing here needs torch.

A scheme of a layer says which tensors are there in the place of the layer's weight [out, in], with their shapes and
dtypes: `int_layers.py` and `float_layers.py` have those that there are. What the tensors mean is in
`services/engine/models/quantized`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Protocol

SCALES = ("F32", "BF16", "F16")  # dtypes that stored scales may have, by safetensors' names


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a layer: the dtypes and shapes that it may have, by safetensors' names."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_required: bool = True


class Per(StrEnum):
    """The numbers of a weight that share a scale."""

    TENSOR = "tensor"
    ROW = "channel"  # those of an output
    GROUP = "group"  # some of a row
    BLOCK = "block"  # a rectangle


SCOPES = {Per.TENSOR: "matrix", Per.ROW: "row"}  # in words


class LayerScheme(Protocol):
    """The way in which one layer's weight is stored."""

    @property
    def mark(self) -> str:
        """Returns the end of the name of the tensor that has the codes, after the layer's name."""

    @property
    def form(self) -> str:
        """Returns the way of storing, in words."""

    def parts(self, out: int, depth: int) -> Mapping[str, Part]:
        """Returns the tensors of a weight [out, depth], by the ends of their names."""

    def misfit(self, out: int, depth: int) -> str | None:
        """Returns why a weight [out, depth] cannot be stored so; None: it can."""

    def kept_bits(self, depth: int) -> float:
        """Returns the bits that a number takes as a code in memory, with its part of scales and offsets."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """The ways of storing of a whole checkpoint. Patterns are regular expressions that a layer's name begins with."""

    method: str  # quant_method of config.json
    targets: tuple[tuple[str, LayerScheme], ...]  # the first pattern that matches counts
    excluded: tuple[str, ...] = ()

    def layer(self, name: str) -> LayerScheme | None:
        """Returns the way in which the layer with this name is stored; None: as numbers."""
        if self.excluded and _any_of(self.excluded).match(name):
            return None
        return next((layer for pattern, layer in self.targets if _any_of((pattern,)).match(name)), None)


@cache
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def undivided(depth: int, group: int) -> str | None:
    """Returns why a row of this depth does not consist of whole groups, in words; None: it does."""
    return f"{depth} inputs are no multiple of the group, {group}" if depth % group else None
