"""The class of this processor: which instructions kernels are made of, and what follows from it for their shapes.

    amx           tiles of 16 rows of 64 bytes multiply bfloat16; all else as below
    avx512_bf16   vectors of 16 float32 in one register; pairs of bfloat16 are multiplied and added in one instruction
    avx512        the same without the latter: bfloat16 is made float32, then multiplied
    avx2          vectors of 8 float32, so that one of 16 takes two registers

A lower class than the processor's own can be chosen by BATON_CPU_ISA. A new class is a new entry of `ISAS`; what it has
instructions of its own for, `vectors.py` and `register_tiles.py` ask it.
"""

import ctypes
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from services.config import CPU_ISA_VARIABLE

AUTO = "auto"
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # of Linux on x86-64
_AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AMX = "amx-"
_FAST_PAIRS = "znver"  # beginning of LLVM's names for AMD's processors since 2017


class IsaError(ValueError):
    """A class of processors was asked for that is none, or above this processor's. The text is for a person."""


@dataclass(frozen=True, slots=True)
class Isa:
    """A class of processors. Names of features and processors are LLVM's."""

    name: str
    features: tuple[str, ...]  # that a processor of the class has at least
    above: tuple[str, ...]  # beginnings of names of features that its kernels do without
    processor: str  # an early one of the class
    tile_rows: int  # of a register tile (see `register_tiles`), whose sums and what else is needed fill the registers
    tile_vectors: int
    has_amx: bool = False
    has_avx512: bool = True
    has_bfloat16: bool = False  # conversions and products of pairs

    def target_features(self, available: Mapping[str, bool]) -> str:
        """For LLVM: what is available, without what is above the class."""
        flags = {name: there and not name.startswith(self.above) for name, there in available.items()}
        # Left alone, LLVM stops at half of an AVX-512 register.
        flags["prefer-256-bit"] = not self.has_avx512
        return ",".join(f"{'+' if there else '-'}{name}" for name, there in flags.items())


ISAS = (
    Isa(
        "amx",
        (*_AVX512, "avx512bf16", "amx-tile", "amx-bf16"),
        above=(),
        processor="sapphirerapids",
        tile_rows=14,
        tile_vectors=2,
        has_amx=True,
        has_bfloat16=True,
    ),
    Isa(
        "avx512_bf16",
        (*_AVX512, "avx512bf16"),
        above=(_AMX,),
        processor="cooperlake",
        tile_rows=14,
        tile_vectors=2,
        has_bfloat16=True,
    ),
    Isa(
        "avx512",
        _AVX512,
        above=(_AMX, "avx10", "avx512bf16", "avx512fp16"),
        processor="skylake-avx512",
        tile_rows=13,
        tile_vectors=2,
    ),
    Isa(
        "avx2",
        _AVX2,
        above=(_AMX, "avx10", "avx512", "avxvnni", "avxneconvert", "avxifma"),
        processor="haswell",
        tile_rows=6,
        tile_vectors=1,
        has_avx512=False,
    ),
)


def choose(environ: Mapping[str, str], features: Mapping[str, bool], processor: str) -> Isa | None:
    """The class that kernels are made for, of a processor with these features; None: it has less than the lowest.

    processor: LLVM's name for it. Raises IsaError when the environment asks for what is not there.

    By itself, only AMD's take `avx512_bf16`: they multiply pairs of bfloat16 at the rate at which they multiply
    float32. A Xeon (with AMX, left unused) came to 0.25 TFLOP/s with pairs and to 0.49 with float32; 2,048 tokens of a
    prompt took 1,448 ms by `avx512_bf16`, and 909 by `avx512`.
    """
    able = [isa for isa in ISAS if all(features.get(name) for name in isa.features)]
    asked = asked_class(environ)
    if asked == AUTO:
        return next((isa for isa in able if _is_fast(isa, environ, processor)), None)
    for isa in able:
        if isa.name == asked:
            return isa
    highest = f"its class is {able[0].name}" if able else "it belongs to none of the classes"
    raise IsaError(f"{CPU_ISA_VARIABLE}={asked}: this processor lacks what that takes; {highest}")


def _is_fast(isa: Isa, environ: Mapping[str, str], processor: str) -> bool:
    """True where no lower class does better, or has to do: AMX may be kept from kernels."""
    if isa.has_amx:
        return may_use_amx(environ)
    return not isa.has_bfloat16 or processor.startswith(_FAST_PAIRS)


def asked_class(environ: Mapping[str, str]) -> str:
    """What the environment asks for: AUTO, or the name of a class. Raises IsaError for any other word."""
    names = (AUTO, *(isa.name for isa in ISAS))
    asked = environ.get(CPU_ISA_VARIABLE, "").strip().lower() or AUTO
    if asked not in names:
        raise IsaError(f"{CPU_ISA_VARIABLE}={asked}: there is no such class; known are {', '.join(names)}")
    return asked


def check(environ: Mapping[str, str]) -> None:
    """Raises IsaError where the environment asks for a class that is none, or above this processor's.

    Without numba, whose compiler knows the processor, it looks at the word alone.
    """
    if asked_class(environ) != AUTO and importlib.util.find_spec("numba") is not None:
        choose(environ, host_features(), host_processor())


def may_use_amx(environ: Mapping[str, str]) -> bool:
    """True unless oneDNN's variable names an instruction set without AMX, which keeps our kernels from it too."""
    most = environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    return most in ("DEFAULT", "ALL") or "AMX" in most


@cache
def this_isa() -> Isa | None:
    """This process's, for its life. None: kernels know no instructions of this processor. Raises IsaError.

    From now on this process may use AMX, where that is in it.
    """
    return choose(os.environ, host_features(), host_processor())


def known_isa() -> Isa:
    """`this_isa`, for kernels, which are only made where there is one."""
    isa = this_isa()
    assert isa is not None, "there are no kernels for this processor: `load.why_not_fused` says so"
    return isa


def host_processor() -> str:
    """LLVM's name for this processor."""
    from llvmlite import binding  # absent where numba is

    name: str = binding.get_host_cpu_name()
    return name


@cache
def host_features() -> Mapping[str, bool]:
    """What this processor has, and the kernel of the system lets processes use."""
    from llvmlite import binding  # absent where numba is

    if platform.machine() != "x86_64":
        return {}
    features = dict(binding.get_host_cpu_features())
    if features.get("amx-tile") and not _ask_for_tiles():
        features |= {name: False for name in features if name.startswith(_AMX)}
    return features


def _ask_for_tiles() -> bool:
    """Asks Linux for the state that AMX takes in each thread of this process; False: it refuses."""
    if platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
