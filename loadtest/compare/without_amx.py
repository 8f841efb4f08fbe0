"""AMX, left unused by all servers of a comparison, on a machine that has it: figures for the many that have none.

Baton takes the class of processors that it takes on one of Intel's without AMX. oneDNN, with which vLLM multiplies, has
a limit of its own; vLLM's attention is told by `vllm_mend`. llama.cpp uses AMX for quantized weights and float16,
not for bfloat16.
"""

import os

_ENVIRONMENT = {"BATON_CPU_ISA": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def hide_amx() -> None:
    """Hides AMX from all processes that are started from now on. A class that BATON_CPU_ISA names stays."""
    os.environ.update(_ENVIRONMENT | {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ})


def is_amx_hidden() -> bool:
    """Returns True if `hide_amx` was called, or the environment says the same."""
    return all(name in os.environ for name in _ENVIRONMENT)
