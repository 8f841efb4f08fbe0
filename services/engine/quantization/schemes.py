"""Ways in which checkpoints store quantized layers, as the settings of config.json tell them. Nothing here needs torch.

A scheme of a layer says which tensors are there in the place of the layer's weight [out, in], with their shapes and
dtypes. What the tensors mean is in `services/engine/models/quantized`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Protocol

_SCALES = ("F32", "BF16", "F16")
_INT32 = ("I32",)
_FP8 = ("F8_E4M3",)
_WORD_BITS = 32
_WIDE, _HALF = 32, 16  # bits of scales and offsets in memory
MX_BLOCK = 32  # numbers with one exponent


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqLayer:
    """AutoAWQ's `gemm`: eight numbers of neighbouring outputs in a word, by turns; groups with scale and zero point."""

    group: int | None  # numbers of a row with one scale; None: all
    bits: int = 4

    @property
    def mark(self) -> str:
        """See `LayerScheme.mark`."""
        return ".qweight"

    @property
    def form(self) -> str:
        """See `LayerScheme.form`."""
        return f"AWQ, 4 bits, {group_words(self.group)}, with zero points"

    def parts(self, out: int, depth: int) -> Mapping[str, Part]:
        """See `LayerScheme.parts`."""
        groups, words = num_groups(self.group, depth), out * self.bits // _WORD_BITS
        return {
            ".qweight": Part(_INT32, ((depth, words),)),
            ".qzeros": Part(_INT32, ((groups, words),)),
            ".scales": Part(_SCALES, ((groups, out),)),
        }

    def kept_bits(self, depth: int) -> float:
        """See `LayerScheme.kept_bits`."""
        return self.bits + 2 * _WIDE / (self.group or depth)

    def misfit(self, out: int, depth: int) -> str | None:
        """See `LayerScheme.misfit`."""
        if out * self.bits % _WORD_BITS:
            return f"{out} outputs are no multiple of 8"
        return None if self.group is None else _undivided(depth, self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqLayer:
    """AutoGPTQ's and GPTQModel's form: numbers of neighbouring inputs in a word, from its lowest bits on."""

    bits: int
    group: int | None
    is_symmetric: bool
    is_ordered: bool  # desc_act: `g_idx` has the group of each input
    zero_shift: int  # is added to stored zero points: 1, and 0 in gptq_v2

    @property
    def mark(self) -> str:
        """See `LayerScheme.mark`."""
        return ".qweight"

    @property
    def form(self) -> str:
        """See `LayerScheme.form`."""
        zeros = "symmetric" if self.is_symmetric else "with zero points"
        order = ", in the order of activations" if self.is_ordered else ""
        return f"GPTQ, {self.bits} bits, {group_words(self.group)}, {zeros}{order}"

    def parts(self, out: int, depth: int) -> Mapping[str, Part]:
        """See `LayerScheme.parts`."""
        groups = num_groups(self.group, depth)
        return {
            ".qweight": Part(_INT32, ((depth * self.bits // _WORD_BITS, out),)),
            ".qzeros": Part(_INT32, ((groups, out * self.bits // _WORD_BITS),)),
            ".scales": Part(_SCALES, ((groups, out),)),
            ".g_idx": Part(_INT32, ((depth,),), is_required=self.is_ordered),
        }

    def kept_bits(self, depth: int) -> float:
        """See `LayerScheme.kept_bits`."""
        of_group = 2 * _WIDE if not self.is_symmetric else 2 * _HALF if self.bits == 4 else _HALF
        return self.bits + of_group / (self.group or depth)

    def misfit(self, out: int, depth: int) -> str | None:
        """See `LayerScheme.misfit`."""
        of_word = _WORD_BITS // self.bits
        return next(
            (
                f"{size} {words} are no multiple of {of_word}"
                for size, words in ((out, "outputs"), (depth, "inputs"))
                if size % of_word
            ),
            None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedInts:
    """Integers of compressed-tensors: packed in words along a row (`pack-quantized`), or a byte each."""

    bits: int
    is_packed: bool
    per: Per  # TENSOR, ROW or GROUP
    group: int | None  # None: not per group
    is_symmetric: bool
    is_ordered: bool  # `weight_g_idx` has the group of each input
    int8_inputs: bool  # activations are integers of 8 bits too
    static_inputs: bool = False  # their scale is stored

    @property
    def mark(self) -> str:
        """See `LayerScheme.mark`."""
        return ".weight_packed" if self.is_packed else ".weight"

    @property
    def form(self) -> str:
        """See `LayerScheme.form`."""
        zeros = "symmetric" if self.is_symmetric else "with zero points"
        scales = group_words(self.group) if self.per is Per.GROUP else f"a scale for each {_SCOPES[self.per]}"
        order = ", in the order of activations" if self.is_ordered else ""
        inputs = ", activations in 8 bits" if self.int8_inputs else ""
        return f"compressed-tensors, {self.bits} bits, {scales}, {zeros}{order}{inputs}"

    def parts(self, out: int, depth: int) -> Mapping[str, Part]:
        """See `LayerScheme.parts`."""
        groups = num_groups(self.group, depth)
        shapes: tuple[tuple[int, ...], ...] = ((out, groups),) if self.per is Per.GROUP else ((out, 1), (out,))
        if self.per is Per.TENSOR:
            shapes = ((1,), (), (1, 1))
        parts = {".weight_scale": Part(_SCALES, shapes)}
        if self.is_packed:
            parts |= {
                ".weight_packed": Part(_INT32, ((out, -(-depth * self.bits // _WORD_BITS)),)),
                ".weight_shape": Part(("I64", "I32"), ((2,),)),
            }
        else:
            parts[".weight"] = Part(("I8",), ((out, depth),))
        zero_shapes = shapes
        if self.is_packed and self.per is not Per.TENSOR:
            zero_shapes = ((-(-out * self.bits // _WORD_BITS), groups),)
        zero_dtypes = _INT32 if self.is_packed and self.per is not Per.TENSOR else ("I8",)
        parts[".weight_zero_point"] = Part(zero_dtypes, zero_shapes, is_required=not self.is_symmetric)
        if self.is_ordered:
            parts[".weight_g_idx"] = Part(_INT32, ((depth,),))
        return parts | input_parts(self.static_inputs, ("I8",))

    def kept_bits(self, depth: int) -> float:
        """See `LayerScheme.kept_bits`."""
        of_group = 2 * _WIDE if not self.is_symmetric else 2 * _HALF if self.bits == 4 else _HALF
        return self.bits + of_group / (self.group or depth)

    def misfit(self, out: int, depth: int) -> str | None:
        """See `LayerScheme.misfit`."""
        return None if self.group is None else _undivided(depth, self.group)


_SCOPES = {Per.TENSOR: "matrix", Per.ROW: "row"}


def input_parts(is_static: bool, zero_dtypes: tuple[str, ...]) -> dict[str, Part]:
    """Returns the tensors with a static scale of activations, which nobody multiplies by: a scale is made for each
    token instead, which is nearer to the activations.
    """
    if not is_static:
        return {}
    one = ((1,), (), (1, 1))
    return {".input_scale": Part(_SCALES, one), ".input_zero_point": Part(zero_dtypes, one, is_required=False)}


def num_groups(group: int | None, depth: int) -> int:
    """Returns how many groups a row has. The last may be shorter."""
    return 1 if group is None else -(-depth // group)


def group_words(group: int | None) -> str:
    """Returns the numbers that share a scale, in words."""
    return "a scale for each row" if group is None else f"groups of {group}"


def _undivided(depth: int, group: int) -> str | None:
    return f"{depth} inputs are no multiple of the group, {group}" if depth % group else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Layer:
    """Floats of 8 bits (e4m3) with one scale, one for each row, or one for each rectangle."""

    pers: tuple[Per, ...]  # of which the shape of the stored scales chooses one
    block: tuple[int, int] | None = None  # outputs and inputs with one scale, of Per.BLOCK
    scale_ends: tuple[str, ...] = (".weight_scale",)  # names that the scales may have, of which one is there
    input_ends: tuple[str, ...] = ()  # names that a static scale of activations may have
    float8_inputs: bool = False  # activations are e4m3 too, with a scale for each of the weight's groups in a row

    @property
    def mark(self) -> str:
        """See `LayerScheme.mark`."""
        return ".weight"

    @property
    def form(self) -> str:
        """See `LayerScheme.form`."""
        inputs = ", activations in FP8" if self.float8_inputs else ""
        if self.block is not None:
            return f"FP8, a scale for {self.block[0]} x {self.block[1]} numbers{inputs}"
        return f"FP8, a scale for each {' or '.join(_SCOPES[per] for per in self.pers)}{inputs}"

    def parts(self, out: int, depth: int) -> Mapping[str, Part]:
        """See `LayerScheme.parts`."""
        one: tuple[tuple[int, ...], ...] = ((1,), (), (1, 1))
        high, wide = self.block or (1, 1)
        of_per: dict[Per, tuple[tuple[int, ...], ...]] = {
            Per.TENSOR: one,
            Per.ROW: ((out, 1), (out,)),
            Per.BLOCK: ((-(-out // high), -(-depth // wide)),),
        }
        shapes = tuple(shape for per in self.pers for shape in of_per[per])
        parts = {".weight": Part(_FP8, ((out, depth),))}
        parts |= {end: Part(_SCALES, shapes, is_required=len(self.scale_ends) == 1) for end in self.scale_ends}
        return parts | {end: Part(_SCALES, one, is_required=False) for end in self.input_ends}

    def kept_bits(self, depth: int) -> float:
        """See `LayerScheme.kept_bits`."""
        return 8 + _WIDE / (depth if self.block is None else self.block[1])

    def misfit(self, out: int, depth: int) -> str | None:
        """See `LayerScheme.misfit`."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Experts:
    """gpt-oss' tensors of all experts, [experts, in, out], in blocks of 32 inputs with an exponent for each (Open
    Compute Project 2023, MX formats 1.0): codes [experts, out, in / 32, 16], two in a byte, the lower half first.
    """

    @property
    def mark(self) -> str:
        """See `LayerScheme.mark`."""
        return "_blocks"

    @property
    def form(self) -> str:
        """See `LayerScheme.form`."""
        return "MXFP4, an exponent for 32 numbers"

    def parts(self, out: int, depth: int, num_experts: int = 1) -> Mapping[str, Part]:
        """See `LayerScheme.parts`."""
        blocks = num_experts, out, depth // MX_BLOCK
        return {"_blocks": Part(("U8",), ((*blocks, MX_BLOCK // 2),)), "_scales": Part(("U8",), (blocks,))}

    def kept_bits(self, depth: int) -> float:
        """See `LayerScheme.kept_bits`."""
        return 4 + _HALF / MX_BLOCK

    def misfit(self, out: int, depth: int) -> str | None:
        """See `LayerScheme.misfit`."""
        return _undivided(depth, MX_BLOCK)
