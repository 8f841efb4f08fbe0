"""AMX, left unused by all servers of a comparison, on a machine that has it: figures for the many that have none.

Baton takes the class of processors that it takes on one of Intel's without AMX. oneDNN, with which vLLM multiplies, has
a limit of its own; vLLM's attention is told by `vllm_mend`. llama.cpp uses AMX for quantized weights and float16,
not for bfloat16.
"""

import os

from loadtest.cannot_run import CannotRun

_CLASS, _HIDDEN = "BATON_CPU_ISA", "LOADTEST_AMX_HIDDEN"


def hide_amx() -> None:
    """Hides AMX from all processes that are started from now on. A lower class that BATON_CPU_ISA names stays.

    Raises CannotRun where it names AMX.
    """
    if os.environ.get(_CLASS) == "amx":
        raise CannotRun(f"{_CLASS} names AMX, which --without-amx leaves unused")
    os.environ.setdefault(_CLASS, "avx512")
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    os.environ[_HIDDEN] = "1"


def is_amx_hidden() -> bool:
    """Returns True if `hide_amx` was called."""
    return _HIDDEN in os.environ
