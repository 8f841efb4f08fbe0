"""Which class of processors kernels are made for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.config import CPU_ISA_VARIABLE
from services.engine.kernels.cpu import isa
from services.engine.kernels.cpu.isa import ISAS, Isa, IsaError, choose, may_use_amx
from tests import machine

ROOT = Path(__file__).parents[3]
AMX, AVX512_BF16, AVX512, AVX2 = ISAS
ZEN = "znver4"
ARM = dict.fromkeys(("neon", "sve", "sve2", "bf16", "i8mm"), True)
BY_NAME = pytest.mark.parametrize("of", ISAS, ids=lambda of: of.name)


def features(of: Isa) -> dict[str, bool]:
    """Of a processor that has what the class takes, and no more of what is a class's."""
    every = {name: False for each in ISAS for name in each.features}
    return every | dict.fromkeys(of.features, True)


def asking(name: str) -> dict[str, str]:
    return {CPU_ISA_VARIABLE: name}


@BY_NAME
def test_a_processor_is_of_the_highest_class_of_which_it_has_everything(of: Isa) -> None:
    assert choose({}, features(of), ZEN) is of
    assert choose(asking("auto"), features(of), ZEN) is of
    assert choose(asking(""), features(of), ZEN) is of


@pytest.mark.parametrize("processor", ["cooperlake", "rocketlake", "sapphirerapids"])
def test_intel_processors_without_amx_multiply_float32_unless_asked_for_pairs(processor: str) -> None:
    assert choose({}, features(AVX512_BF16), processor) is AVX512
    assert choose(asking("auto"), features(AVX512_BF16), processor) is AVX512
    assert choose(asking("avx512_bf16"), features(AVX512_BF16), processor) is AVX512_BF16
    assert choose({}, features(AMX), processor) is AMX


@BY_NAME
def test_without_one_feature_it_is_of_a_lower_class(of: Isa) -> None:
    for name in of.features:
        found = choose({}, features(of) | {name: False}, ZEN)
        assert found is None or ISAS.index(found) > ISAS.index(of)


@BY_NAME
def test_its_own_class_and_all_below_can_be_asked_for(of: Isa) -> None:
    for lower in ISAS[ISAS.index(of) :]:
        assert choose(asking(lower.name), features(of), ZEN) is lower
        assert choose(asking(f" {lower.name.upper()} "), features(of), ZEN) is lower


@BY_NAME
def test_a_class_above_its_own_is_refused(of: Isa) -> None:
    for higher in ISAS[: ISAS.index(of)]:
        with pytest.raises(
            IsaError, match=f"{higher.name}: this processor lacks what that takes; its class is {of.name}"
        ):
            choose(asking(higher.name), features(of), ZEN)


def test_a_word_that_is_no_class_is_refused_whatever_the_processor() -> None:
    for available in (features(AMX), ARM, {}):
        with pytest.raises(IsaError, match=r"sse2: there is no such class; known are auto, amx, .*, avx2"):
            choose(asking("sse2"), available, ZEN)


@pytest.mark.parametrize("available", [{}, ARM, {"sse4.2": True, "avx": True}], ids=["none", "ARM", "AVX"])
def test_a_processor_of_no_class_has_no_kernels(available: dict[str, bool]) -> None:
    assert choose({}, available, ZEN) is None
    with pytest.raises(IsaError, match="it belongs to none of the classes"):
        choose(asking("avx2"), available, ZEN)


def test_kernels_are_compiled_for_nothing_above_their_class() -> None:
    """On a processor that has everything."""
    every = dict.fromkeys(
        ("avx10.1", "avxvnni", "avxneconvert", "avx512fp16", "amx-fp16", "sse4.2", *AMX.features), True
    )
    on = {of.name: {flag[1:] for flag in of.target_features(every).split(",") if flag[0] == "+"} for of in ISAS}
    assert on["amx"] == every.keys()
    assert on["avx512_bf16"] == {name for name in every if not name.startswith("amx")}
    assert on["avx512"] == {"avx512vnni", "avxvnni", "avxneconvert", "sse4.2", *AVX512.features}
    assert on["avx2"] == {"prefer-256-bit", "sse4.2", *AVX2.features}


@BY_NAME
@pytest.mark.parametrize("has", [False, True])
def test_four_int8_are_multiplied_at_once_where_class_and_processor_have_it(of: Isa, has: bool) -> None:
    """Of the class avx512 are processors without it, as Intel's of 2017."""
    available = features(of) | ({"avx512vnni": True} if has else {})
    assert of.has_vnni(available) == (of in (AMX, AVX512_BF16) or (of is AVX512 and has))


@pytest.mark.parametrize(
    ("most", "may"),
    [
        (None, True),
        ("default", True),
        ("ALL", True),
        ("AVX512_CORE_AMX_FP16", True),
        ("AVX10_1_512_AMX", True),
        ("AVX512_CORE_BF16", False),
        ("avx2", False),
    ],
)
def test_who_keeps_onednn_from_amx_keeps_kernels_from_it(most: str | None, may: bool) -> None:
    environ = {} if most is None else {"ONEDNN_MAX_CPU_ISA": most}
    assert may_use_amx(environ) == may
    assert choose(environ, features(AMX), ZEN) is (AMX if may else AVX512_BF16)
    assert choose(environ | asking("amx"), features(AMX), ZEN) is AMX  # who names it means it


@machine.needs(machine.AMX)
def test_where_the_processor_has_amx_kernels_have_it() -> None:
    """Else all tests of them would run without it, and prove nothing."""
    assert choose({}, isa.host_features(), ZEN) is AMX


def test_kernels_use_amx_unless_this_run_hides_it() -> None:
    expected = AVX512_BF16 if machine.is_hidden(machine.AMX) else AMX
    assert choose(without_class(os.environ), features(AMX), ZEN) is expected


def test_a_run_can_hide_amx_from_kernels() -> None:
    """Also from processes that its tests start."""
    test = f"{Path(__file__).relative_to(ROOT)}::{test_kernels_use_amx_unless_this_run_hides_it.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hide-cpu-feature", machine.AMX, test]
    environ = {name: value for name, value in os.environ.items() if name != "CI"}  # where nothing may be hidden
    found = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (found.returncode, "1 passed" in found.stdout) == (0, True), found.stdout


def without_class(environ: "os._Environ[str]") -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != CPU_ISA_VARIABLE}
