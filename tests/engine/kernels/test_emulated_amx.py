"""Kernels for AMX run over its emulator, and the emulator refuses what the processor refuses."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.engine.kernels.emulation import build
from tests.machine import BFLOAT16, GCC, NO_AMX, needs

pytestmark = needs(GCC)

ROOT = Path(__file__).parents[3]
EMULATED = (  # of parametrized tests, the cases in bfloat16: products, both kernels for attention, whole models
    "tests/engine/kernels/test_amx.py::test_a_product_of_tiles",
    "tests/engine/kernels/test_amx.py::test_denormals_are_zero",
    "tests/engine/kernels/test_amx.py::test_a_product_of_bytes",
    "tests/engine/kernels/test_packed_linear.py",
    "tests/engine/kernels/test_coded_linear.py::test_long_rows",
    "tests/engine/kernels/test_coded_linear.py::test_matrices_of_several_kinds_one_below_the_other",
    "tests/engine/kernels/test_coded_linear.py::test_rows_that_lie_apart_and_blocks_of_rows",
    "tests/engine/kernels/test_int8_linear.py",
    "tests/engine/test_attention.py::test_rows_of_any_mixture",
    "tests/engine/test_attention.py::test_head_dims[cpu-40-dtype1]",
    "tests/engine/test_attention.py::test_single_tokens_over_many_keys[cpu-96-None]",
    "tests/engine/test_attention.py::test_single_tokens_over_many_keys[cpu-128-100]",
    "tests/engine/test_attention.py::test_groups_of_more_than_four_queries_in_bfloat16",
    "tests/engine/test_attention.py::test_single_tokens_of_many_or_wide_heads",
    "tests/engine/test_attention.py::test_what_lies_behind_the_last_key_does_not_matter",
    "tests/engine/test_attention.py::test_block_sizes_in_bfloat16[cpu-32]",
    "tests/engine/test_attention.py::test_prompts_longer_than_what_amx_takes_at_once",
    "tests/engine/test_attention.py::test_scores_that_grow_along_the_keys_in_bfloat16",
    "tests/engine/test_attention.py::test_a_window_hides_older_tokens",
    "tests/engine/test_attention.py::test_rows_that_share_a_prefix",
    "tests/engine/test_attention.py::test_soft_caps_and_sinks",
    "tests/engine/test_torch_runner.py::test_what_unwritten_blocks_hold_does_not_matter",
    "tests/engine/test_torch_runner.py::test_rows_in_blocks_are_computed_as_all_at_once",
    "tests/engine/test_torch_runner.py::test_recorded_steps_compute_what_others_do",
    "tests/engine/test_torch_runner.py::test_few_queries_get_what_they_get_among_all[bfloat16]",
    "tests/engine/test_attention.py::test_a_narrowed_plan_attends_as_the_whole_one",
    "tests/engine/test_torch_runner.py::test_half_precision_stays_near_float32",
)


@pytest.mark.long
@needs(NO_AMX)
@needs(BFLOAT16)  # elsewhere all of its vectors are emulated too, which takes minutes
def test_kernels_pass_their_tests_over_the_emulator(tmp_path: Path) -> None:
    """Where there is AMX, the same tests run on the processor. Kernels over the emulator are not kept for others."""
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    options = ["--long", "-p", "tests.engine.kernels.emulated_amx", "-p", "no:cacheprovider", "--capture=sys"]
    command = [sys.executable, "-m", "pytest", *options, "--basetemp", str(tmp_path / "emulated"), *EMULATED]
    found = subprocess.run(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert found.returncode == 0, found.stdout
    assert not (tmp_path / "cache" / "baton" / "kernels").exists()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("emulator"))


def configuration(rows: dict[int, int], row_bytes: dict[int, int] | None = None, **fields: int) -> bytes:
    """rows: of tiles; others have none. row_bytes: 64 where there is none. fields: further bytes, as `at_<number>`."""
    config = np.zeros(64, dtype=np.uint8)
    config[0] = 1
    for tile, count in rows.items():
        config[48 + tile] = count
        config[16 + 2 * tile] = (row_bytes or {}).get(tile, 64)
    for name, value in fields.items():
        config[int(name.removeprefix("at_"))] = value
    return config.tobytes()


THREE = {0: 16, 1: 16, 2: 16}
MULTIPLY = "tdpbf16ps 0 1 2"
REFUSED = {  # by message: a configuration, and the instruction after it
    "no configuration is loaded": (b"", "tilezero 0"),
    "the tile is not configured": (configuration(THREE), "tilezero 3"),
    "no such tile": (configuration(THREE), "tilezero 8"),
    "no such palette": (configuration(THREE, at_0=2), MULTIPLY),
    "a row to start at, or reserved bytes": (configuration(THREE, at_1=1), MULTIPLY),
    "reserved bytes after the sizes of rows": (configuration(THREE, at_40=1), MULTIPLY),
    "reserved bytes after the rows": (configuration(THREE, at_60=1), MULTIPLY),
    "too many rows": (configuration({0: 17}), MULTIPLY),
    "rows that are too long": (configuration(THREE, {1: 65}), MULTIPLY),
    "rows of no bytes, or bytes of no rows": (configuration(THREE, {1: 0}), MULTIPLY),
    "a tile is named twice": (configuration(THREE), "tdpbf16ps 0 1 1"),
    "the target has other rows than the left tile": (configuration({0: 16, 1: 8, 2: 16}), MULTIPLY),
    "the target has other columns than the right tile": (configuration(THREE, {2: 32}), MULTIPLY),
    "the left tile is not as deep as the right one": (configuration({0: 16, 1: 16, 2: 8}), MULTIPLY),
    "a part of a column": (configuration(THREE, {0: 30, 2: 30}), MULTIPLY),
}
CALL = """
import ctypes, sys
library, config, name, *tiles = sys.argv[1:]
emulator = ctypes.CDLL(library)
if config:
    emulator.ldtilecfg(bytes.fromhex(config))
getattr(emulator, name)(*(ctypes.c_int64(int(tile)) for tile in tiles))
"""


def call(library: Path, config: bytes, instruction: str) -> subprocess.CompletedProcess[str]:
    """One instruction in a process of its own."""
    command = [sys.executable, "-c", CALL, str(library), config.hex(), *instruction.split()]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_ends_the_process(library: Path, message: str) -> None:
    found = call(library, *REFUSED[message])
    assert found.returncode == -signal.SIGABRT
    assert found.stderr.endswith(f": {message}\n")


@pytest.mark.parametrize("config", [configuration(THREE), configuration({0: 3, 1: 3, 2: 5}, {0: 8, 1: 20, 2: 8})])
def test_tiles_whose_shapes_agree_are_multiplied(library: Path, config: bytes) -> None:
    """Or nothing above would be known to be refused for its message's reason."""
    assert call(library, config, MULTIPLY).returncode == 0


def test_sums_of_odd_and_of_even_depths_are_added_last(library: Path) -> None:
    """As the manual has it: 1s are lost beside 2**24, but not where they are added up by themselves."""
    emulator = ctypes.CDLL(str(library))
    left, right, sums = np.ones((16, 16, 2)), np.ones((16, 16, 2)), np.zeros((16, 16), np.float32)
    left[:, 0, 0] = 2**24
    emulator.ldtilecfg(configuration(THREE))
    for tile, values in ((1, left), (2, right)):
        halves = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        emulator.tileloadd64(ctypes.c_int64(tile), ctypes.c_void_p(halves.ctypes.data), ctypes.c_int64(64))
    emulator.tdpbf16ps(*map(ctypes.c_int64, range(3)))
    emulator.tilestored64(ctypes.c_int64(0), ctypes.c_void_p(sums.ctypes.data), ctypes.c_int64(64))
    emulator.ldtilecfg(bytes(64))
    assert (sums == 2**24 + 16).all()
