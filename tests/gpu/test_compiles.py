"""What kernels become on GPUs that are not here: the compiler needs none."""

import pytest

from tests.gpu.compiled import Compiled, compile_all

MODULES = [f"tests.gpu.variants.{name}" for name in ("attention", "coded", "experts", "latents", "rows", "sampling")]
ROWS = ("add_norm", "silu_mul", "quantize_rows", "rotate_and_store", "store_kv 128")


def products_of_codes(compiled: list[Compiled]) -> list[Compiled]:
    of_codes = [kernel for kernel in compiled if "codes, " in kernel.name and kernel.capability == 90]
    return [kernel for kernel in of_codes if not kernel.name.endswith(("add_parts_kernel", "activate_kernel"))]


@pytest.fixture(scope="module")
def compiled_rows(tmp_path_factory) -> list[Compiled]:
    return compile_all(["tests.gpu.variants.rows"], tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[Compiled]:
    """All, which takes minutes."""
    return compile_all(MODULES, tmp_path_factory.mktemp("triton"))


@pytest.mark.long
def test_nothing_spills(compiled):
    assert len(compiled) > 10
    assert [kernel for kernel in compiled if kernel.spilled_bytes] == []


@pytest.mark.long
def test_nothing_of_rows_spills(compiled_rows):
    assert [kernel for kernel in compiled_rows if kernel.spilled_bytes] == []


@pytest.mark.long
def test_rows_move_16_bytes_at_a_time(compiled_rows):
    found = [kernel for kernel in compiled_rows if kernel.name.startswith(ROWS)]
    assert len(found) >= len(ROWS)
    for kernel in found:
        assert kernel.has("LDG.128"), kernel
        assert kernel.has("STG.128"), kernel


@pytest.mark.long
def test_kv_is_read_ahead_16_bytes_at_a_time(compiled):
    attention = [kernel for kernel in compiled if "decode, attend" in kernel.name or "prefill" in kernel.name]
    assert len(attention) == 12
    for kernel in attention:
        assert kernel.has("LDGSTS.128"), kernel
        assert not kernel.has("LDGSTS.64"), kernel


@pytest.mark.long
def test_logits_are_read_16_bytes_at_a_time(compiled):
    scans = [kernel for kernel in compiled if "scan_" in kernel.name]
    assert len(scans) == 5
    assert all(kernel.has("LDG.128") for kernel in scans)


@pytest.mark.long
def test_prompts_are_multiplied_by_hoppers_matrix_units(compiled):
    prefill = [kernel for kernel in compiled if "prefill" in kernel.name]
    assert len(prefill) == 4
    assert all(kernel.has("HGMMA") for kernel in prefill)


@pytest.mark.long
def test_expanded_prompts_are_multiplied_by_hoppers_matrix_units(compiled):
    expanded = [kernel for kernel in compiled if "bfloat16, latents expanded" in kernel.name]
    assert expanded
    for kernel in expanded:
        assert kernel.has("HGMMA"), kernel
        assert kernel.has("LDGSTS.128"), kernel


@pytest.mark.long
def test_experts_of_prompts_are_multiplied_by_hoppers_matrix_units(compiled):
    products = [kernel for kernel in compiled if kernel.name.endswith(("gate_up_kernel", "down_kernel"))]
    assert len(products) == 8
    for kernel in products:
        assert kernel.has("LDGSTS.128"), kernel
        assert kernel.has("HMMA" if kernel.name.startswith("16 rows") else "HGMMA"), kernel


@pytest.mark.long
def test_codes_are_multiplied_by_hoppers_matrix_units(compiled):
    products = [kernel for kernel in products_of_codes(compiled) if "float32" not in kernel.name]
    assert len(products) > 50
    for kernel in products:
        unit = "IGMMA" if "of int8" in kernel.name else "QGMMA" if "of float8" in kernel.name else "HGMMA"
        assert kernel.has(unit), kernel
        assert kernel.has("LDGSTS.128") or kernel.has("LDGSTS.64"), kernel


@pytest.mark.long
def test_codes_become_numbers_two_at_a_time(compiled):
    """Of 4 bits and of e4m3: bytes are permuted, and pairs of 16-bit numbers multiplied or added."""
    others = "of int8", "of float8", "of float32", ", int8"
    unpacked = [kernel for kernel in products_of_codes(compiled) if not any(other in kernel.name for other in others)]
    assert len(unpacked) > 25
    for kernel in unpacked:
        assert kernel.has("PRMT"), kernel
        assert kernel.has("HFMA2"), kernel


@pytest.mark.long
def test_float8_is_made_by_the_gpus_own_conversion(compiled):
    """Products of codes get what another kernel has rounded."""
    for kernel in (each for each in compiled if "codes, " not in each.name):
        converts = "quantize" in kernel.name or ("float8" in kernel.name and "decode" not in kernel.name)
        assert kernel.has("F2FP.E4M3") == converts, kernel


@pytest.mark.long
def test_float8_goes_to_the_matrix_units_in_pairs_when_decoding(compiled):
    (decode,) = [kernel for kernel in compiled if "float8, decode" in kernel.name]
    assert decode.has("LDSM")
    assert not decode.has("LDS.U8")
