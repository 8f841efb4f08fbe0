"""When kernels may use AMX."""

from services.engine.kernels.amx import has_amx, may_use_amx
from tests.machine import AMX, needs


def test_who_keeps_onednn_from_amx_keeps_kernels_from_it() -> None:
    assert may_use_amx({})
    assert may_use_amx({"ONEDNN_MAX_CPU_ISA": "default"})
    assert may_use_amx({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX_FP16"})
    assert not may_use_amx({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"})


@needs(AMX)
def test_where_the_processor_has_it_kernels_have_it() -> None:
    """Else all tests of them would run without it, and prove nothing."""
    assert has_amx()
