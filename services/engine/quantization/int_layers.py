"""Layers of checkpoints that are stored as integers: AWQ's, GPTQ's and those of compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.engine.quantization.schemes import SCALES, SCOPES, Part, Per, undivided

_INT32 = ("I32",)
_WORD_BITS = 32
_WIDE, _HALF = 32, 16  # bits of scales and offsets in memory


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
            ".scales": Part(SCALES, ((groups, out),)),
        }

    def kept_bits(self, depth: int) -> float:
        """See `LayerScheme.kept_bits`."""
        return self.bits + 2 * _WIDE / (self.group or depth)

    def misfit(self, out: int, depth: int) -> str | None:
        """See `LayerScheme.misfit`."""
        if out * self.bits % _WORD_BITS:
            return f"{out} outputs are no multiple of 8"
        return None if self.group is None else undivided(depth, self.group)


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
            ".scales": Part(SCALES, ((groups, out),)),
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
        scales = group_words(self.group) if self.per is Per.GROUP else f"a scale for each {SCOPES[self.per]}"
        order = ", in the order of activations" if self.is_ordered else ""
        inputs = ", activations in 8 bits" if self.int8_inputs else ""
        return f"compressed-tensors, {self.bits} bits, {scales}, {zeros}{order}{inputs}"

    def parts(self, out: int, depth: int) -> Mapping[str, Part]:
        """See `LayerScheme.parts`."""
        groups = num_groups(self.group, depth)
        shapes: tuple[tuple[int, ...], ...] = ((out, groups),) if self.per is Per.GROUP else ((out, 1), (out,))
        if self.per is Per.TENSOR:
            shapes = ((1,), (), (1, 1))
        parts = {".weight_scale": Part(SCALES, shapes)}
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
        return None if self.group is None else undivided(depth, self.group)


def input_parts(is_static: bool, zero_dtypes: tuple[str, ...]) -> dict[str, Part]:
    """Returns the tensors with a static scale of activations, which nobody multiplies by: a scale is made for each
    token instead, which is nearer to the activations.
    """
    if not is_static:
        return {}
    one = ((1,), (), (1, 1))
    return {".input_scale": Part(SCALES, one), ".input_zero_point": Part(zero_dtypes, one, is_required=False)}


def num_groups(group: int | None, depth: int) -> int:
    """Returns how many groups a row has. The last may be shorter."""
    return 1 if group is None else -(-depth // group)


def group_words(group: int | None) -> str:
    """Returns the numbers that share a scale, in words."""
    return "a scale for each row" if group is None else f"groups of {group}"
