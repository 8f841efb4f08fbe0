"""Says whether this machine can run fused kernels. Nothing here needs torch, nor numba before it is installed."""

import importlib.util

from services.engine.kernels.cpu.isa import this_isa

FUSED_DTYPES = ("bfloat16", "float32")


def why_no_kernels(dtype: str) -> str | None:
    """Returns the reason why there are no fused kernels here for a model in this dtype, for a person to read; None:
    there are. Raises IsaError.
    """
    if dtype not in FUSED_DTYPES:
        return f"there are none for {dtype}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if this_isa() is None:
        return "there are none for this processor"
    return None
