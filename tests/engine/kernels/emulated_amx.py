"""AMX on processors that lack it, for tests: its instructions are calls of amx_emulator.c.

A plugin of pytest, for a process of its own, in which kernels are made after it:

    python -m pytest -p tests.engine.kernels.emulated_amx tests/engine/kernels/test_packed_linear.py

The process takes the machine for one with AMX. Of parametrized tests it runs the cases that may reach AMX. Each test
has to make products of tiles, so that none passes because other kernels ran. With `--capture=sys` the emulator's last
message is seen, which pytest keeps to itself otherwise when the process ends.
"""

import ctypes
from collections.abc import Generator
from typing import Any

import pytest
import torch

from tests import machine
from tests.engine.kernels.emulation import emulate

_CONFIG_BYTES = 64
_WITHOUT_PRODUCTS = (
    "test_shapes_that_amx_does_not_take",
    "test_an_odd_depth_is_torchs_in_bfloat16",
    "test_what_it_does_not_multiply",
)  # tests that have to make none


class EmulatedRun:
    """A run of tests over the emulator."""

    def __init__(self, emulator: ctypes.CDLL) -> None:
        emulator.num_products.restype = ctypes.c_int64
        self._emulator = emulator

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leaves out the cases of other dtypes and backends."""
        others = [item for item in items if not _may_reach_amx(getattr(item, "callspec", None))]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """Fails a test that made no product, or after which tiles are still in use."""
        before = self._emulator.num_products()
        yield
        made_some = self._emulator.num_products() > before
        assert made_some or item.name.startswith(_WITHOUT_PRODUCTS), f"{item.name} made no products of tiles"
        assert not self._is_configured(), f"{item.name} left a tile configuration behind"

    def _is_configured(self) -> bool:
        """Of this thread."""
        config = ctypes.create_string_buffer(_CONFIG_BYTES)
        self._emulator.sttilecfg(config)
        return any(config.raw)


def _may_reach_amx(case: Any) -> bool:
    """case: a parametrized test's parameters, or None."""
    parameters = {} if case is None else case.params
    dtype, backend = parameters.get("dtype", torch.bfloat16), parameters.get("backend", "cpu")
    return dtype in (torch.bfloat16, "bfloat16") and backend == "cpu"


def pytest_configure(config: pytest.Config) -> None:
    """Kernels and tests take the processor for one with AMX."""
    emulator = emulate("amx")
    assert emulator is not None, "this processor has AMX"
    machine.FEATURES[machine.AMX] = lambda: True
    config.pluginmanager.register(EmulatedRun(emulator), "emulated-amx")
