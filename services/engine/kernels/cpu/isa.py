"""The class of this processor: which instructions kernels consist of, and which shapes follow from them.

    amx           tiles of 16 rows of 64 bytes multiply bfloat16 and int8; all else as below
    avx512_bf16   vectors of 16 float32 in one register; pairs of bfloat16 are multiplied and added in one instruction,
                  and so are four int8 (VNNI)
    avx512        vectors as above; bfloat16 is converted to float32, then multiplied; four int8 are multiplied and
                  added in one instruction where the processor has it (`has_vnni`), else as below
    avx2          vectors of 8 float32, so that one of 16 takes two registers; int8 is converted to int16, of which
                  pairs are multiplied

BATON_CPU_ISA chooses a lower class than the processor's own. A new class is a new entry of `ISAS`; `vectors.py` and
`register_tiles.py` ask the class which instructions it has.
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
_VNNI = "avx512vnni"
_AMD = "znver"  # beginning of LLVM's names for AMD's processors since 2017


class IsaError(ValueError):
    """The environment names no class of processors, or one above this processor's. The text is for a person."""


@dataclass(frozen=True, slots=True)
class Isa:
    """A class of processors. Names of features and processors are LLVM's."""

    name: str
    features: tuple[str, ...]  # that every processor of the class has
    above: tuple[str, ...]  # prefixes of features' names that its kernels do not use
    processor: str  # an early one of the class
    tile_rows: int  # of a register tile (see `register_tiles`), whose sums and operands fill the registers
    tile_vectors: int
    has_amx: bool = False
    has_avx512: bool = True
    has_bfloat16: bool = False  # conversions and products of pairs

    @property
    def num_vectors(self) -> int:
        """Returns how many vectors of 16 float32 the registers hold."""
        return 32 if self.has_avx512 else 8

    def target_features(self, available: Mapping[str, bool]) -> str:
        """Returns LLVM's text of features: those that are available, without those above the class."""
        flags = {name: there and not name.startswith(self.above) for name, there in available.items()}
        # By default LLVM uses only half of an AVX-512 register.
        flags["prefer-256-bit"] = not self.has_avx512
        return ",".join(f"{'+' if there else '-'}{name}" for name, there in flags.items())

    def has_vnni(self, available: Mapping[str, bool]) -> bool:
        """Returns True if kernels multiply four int8 in one instruction on a processor with these features."""
        return _VNNI in self.features or (self.has_avx512 and available.get(_VNNI, False))


ISAS = (
    Isa(
        "amx",
        (*_AVX512, _VNNI, "avx512bf16", "amx-tile", "amx-bf16", "amx-int8"),
        above=(),
        processor="sapphirerapids",
        tile_rows=14,
        tile_vectors=2,
        has_amx=True,
        has_bfloat16=True,
    ),
    Isa(
        "avx512_bf16",
        (*_AVX512, _VNNI, "avx512bf16"),
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
    """Chooses the class of the kernels for a processor with these features; None: it is below the lowest class.

    processor: LLVM's name for it. Raises IsaError when the environment asks for a class that the processor is not.

    Without a word from the environment, only AMD's processors get `avx512_bf16`: they multiply pairs of bfloat16 at the
    rate at which they multiply float32. A Xeon (with AMX, left unused) came to 0.25 TFLOP/s with pairs and to 0.49 with
    float32; 2,048 tokens of a prompt took 1,448 ms by `avx512_bf16`, and 909 by `avx512`.
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
    """Returns False if a lower class is faster, or if the environment keeps AMX from kernels."""
    if isa.has_amx:
        return may_use_amx(environ)
    return not isa.has_bfloat16 or is_amd(processor)


def is_amd(processor: str) -> bool:
    """Returns True if LLVM's name for a processor is that of one of AMD's since 2017."""
    return processor.startswith(_AMD)


def asked_class(environ: Mapping[str, str]) -> str:
    """Returns the environment's choice: AUTO, or the name of a class. Raises IsaError for any other word."""
    names = (AUTO, *(isa.name for isa in ISAS))
    asked = environ.get(CPU_ISA_VARIABLE, "").strip().lower() or AUTO
    if asked not in names:
        raise IsaError(f"{CPU_ISA_VARIABLE}={asked}: there is no such class; known are {', '.join(names)}")
    return asked


def check(environ: Mapping[str, str]) -> None:
    """Raises IsaError if the environment asks for an unknown class, or for one above this processor's.

    Without numba, whose compiler knows the processor, it checks the word alone.
    """
    if asked_class(environ) != AUTO and importlib.util.find_spec("numba") is not None:
        choose(environ, host_features(), host_processor())


def may_use_amx(environ: Mapping[str, str]) -> bool:
    """Returns False if oneDNN's variable names an instruction set without AMX; our kernels then avoid AMX too."""
    most = environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    return most in ("DEFAULT", "ALL") or "AMX" in most


@cache
def this_isa() -> Isa | None:
    """Returns this process's class, which never changes. None: there are no kernels for this processor. Raises
    IsaError.

    If the class has AMX, this process may use it from now on.
    """
    return choose(os.environ, host_features(), host_processor())


def known_isa() -> Isa:
    """Returns `this_isa()` for kernels, which are made only if there is a class."""
    isa = this_isa()
    assert isa is not None, "there are no kernels for this processor: `load.why_not_fused` says so"
    return isa


def host_processor() -> str:
    """Returns LLVM's name for this processor."""
    from llvmlite import binding  # absent where numba is absent

    name: str = binding.get_host_cpu_name()
    return name


@cache
def host_features() -> Mapping[str, bool]:
    """Returns the features that this processor has and the operating system permits."""
    from llvmlite import binding  # absent where numba is absent

    if platform.machine() != "x86_64":
        return {}
    features = dict(binding.get_host_cpu_features())
    if features.get("amx-tile") and not _ask_for_tiles():
        features |= {name: False for name in features if name.startswith(_AMX)}
    return features


def _ask_for_tiles() -> bool:
    """Asks Linux for the state that AMX needs in each thread of this process. Returns False if Linux refuses."""
    if platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0
