"""Products in int8 are the same in every class of processors, to the bit."""

import random

import numpy as np
import pytest

from services.engine.kernels.cpu.isa import ISAS
from tests.engine.kernels.class_process import run_as, run_emulated, run_lacking, runnable
from tests.engine.kernels.int8_products import outputs
from tests.machine import GCC, needs

Outputs = tuple[list[np.ndarray], list[np.ndarray]]
OUTPUTS = f"{outputs.__module__}:{outputs.__name__}"


def assert_same(found: Outputs) -> None:
    """SiLU's exponential may differ in its last bits."""
    (expected, expected_gated), (products, gated) = outputs(), found
    assert len(products) == len(expected)
    for own, other in zip(expected, products, strict=True):
        assert np.array_equal(own, other), own.shape
    for own, other in zip(expected_gated, gated, strict=True):
        assert np.allclose(own, other, rtol=1e-5, atol=1e-30), own.shape


@pytest.mark.long
@pytest.mark.parametrize("isa", [isa.name for isa in runnable()])
def test_every_class_of_this_processor_computes_the_same(isa: str) -> None:
    assert_same(run_as(isa, OUTPUTS))


@pytest.mark.long
@pytest.mark.parametrize("isa", [isa.name for isa in runnable() if isa.name == "avx512"])
def test_so_does_a_processor_without_vnni(isa: str) -> None:
    assert_same(run_lacking("avx512vnni", isa, OUTPUTS))


@pytest.mark.long
@needs(GCC)
def test_so_does_a_class_that_this_processor_is_not() -> None:
    """One of them, another with each run."""
    others = [isa.name for isa in ISAS if isa not in runnable()]
    if others:
        assert_same(run_emulated(random.choice(others), OUTPUTS))
