"""AMX on processors that lack it, for tests: its instructions are calls of amx_emulator.c.

A plugin of pytest, for a process of its own, in which kernels are made after it:

    python -m pytest -p tests.engine.kernels.emulated_amx tests/engine/kernels/test_packed_linear.py

The process takes the machine for one with AMX. Of parametrized tests it runs the cases that may reach AMX. Each test
has to make products of tiles, so that none passes because other kernels ran. With `--capture=sys` the emulator's last
message is seen, which pytest keeps to itself otherwise when the process ends.
"""

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from llvmlite import ir

from tests import machine

_SOURCE = Path(__file__).with_name("amx_emulator.c")
_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
_KERNELS = "services.engine.kernels."
_CONFIG_BYTES = 64
_WITHOUT_PRODUCTS = (
    "test_shapes_that_amx_does_not_take",
    "test_an_odd_depth_is_torchs_in_bfloat16",
)  # tests that have to make none


def build(directory: Path) -> Path:
    """Compiles the emulator to a shared library. Raises CalledProcessError; the compiler's message is on stderr."""
    library = directory / "amx_emulator.so"
    subprocess.run([machine.GCC, *_FLAGS, "-o", library, _SOURCE], check=True)
    return library


def install() -> ctypes.CDLL:
    """Makes all kernels that are made from now on use the emulator, and returns it.

    Raises RuntimeError where modules of kernels are imported already: they would have AMX's own instructions.
    """
    early = [name for name in sys.modules if name.startswith(_KERNELS)]
    if early:
        raise RuntimeError(f"imported before AMX was emulated: {', '.join(early)}")
    with tempfile.TemporaryDirectory() as directory:
        emulator = ctypes.CDLL(str(build(Path(directory))))
    _replace_detection()
    _keep_nothing()
    _replace_instructions(emulator)
    return emulator


def _keep_nothing() -> None:
    """Kernels that call the emulator's addresses are of use to this process alone."""
    from services.engine.kernels.cpu import code_store

    code_store.the_code_store = code_store.NoStore  # type: ignore[assignment]


def _replace_instructions(emulator: ctypes.CDLL) -> None:
    """Calls of LLVM's intrinsics become calls of the emulator's functions, by address."""
    from services.engine.kernels.cpu.amx import tiles

    def call(context: Any, builder: Any, name: str, values: list[Any]) -> Any:
        function = getattr(emulator, name.removeprefix("llvm.x86."))
        arguments = [_widened(builder, value) for value in values]
        function_type = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        address = ir.IntType(64)(ctypes.cast(function, ctypes.c_void_p).value)
        builder.call(builder.inttoptr(address, function_type.as_pointer()), arguments)
        return context.get_dummy_value()

    tiles._call = call


def _widened(builder: Any, value: Any) -> Any:
    """The number of a tile as int64; addresses and strides as they are."""
    is_tile = isinstance(value.type, ir.IntType) and value.type.width == 8
    return builder.zext(value, ir.IntType(64)) if is_tile else value


def _replace_detection() -> None:
    """Kernels and tests take the processor for one with AMX."""
    from services.engine.kernels.cpu import isa

    (amx,) = [one for one in isa.ISAS if one.has_amx]
    isa.this_isa = lambda: amx  # type: ignore[assignment]
    machine.FEATURES[machine.AMX] = lambda: True


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
    config.pluginmanager.register(EmulatedRun(install()), "emulated-amx")
