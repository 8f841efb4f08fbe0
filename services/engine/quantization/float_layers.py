"""Layers of checkpoints that are stored as floats of few bits: FP8, and gpt-oss' MXFP4."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.engine.quantization.schemes import SCALES, SCOPES, Part, Per, undivided

MX_BLOCK = 32  # numbers with one exponent
_FP8 = ("F8_E4M3",)
_SCALE_BITS = 32  # in memory
_MX_SCALE_BITS = 16


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
        return f"FP8, a scale for each {' or '.join(SCOPES[per] for per in self.pers)}{inputs}"

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
        parts |= {end: Part(SCALES, shapes, is_required=len(self.scale_ends) == 1) for end in self.scale_ends}
        return parts | {end: Part(SCALES, one, is_required=False) for end in self.input_ends}

    def kept_bits(self, depth: int) -> float:
        """See `LayerScheme.kept_bits`."""
        return 8 + _SCALE_BITS / (depth if self.block is None else self.block[1])

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
        return 4 + _MX_SCALE_BITS / MX_BLOCK

    def misfit(self, out: int, depth: int) -> str | None:
        """See `LayerScheme.misfit`."""
        return undivided(depth, MX_BLOCK)
