"""Kernels that one process has compiled, others load: they compile nothing, and compute the same."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from llvmlite import binding
from numba.core.event import install_recorder

from services.config import CPU_ISA_VARIABLE
from services.engine.kernels.cpu import code_store, compiled, small
from services.engine.kernels.cpu.code_store import CodeDirectory
from services.engine.kernels.cpu.isa import AUTO
from services.engine.kernels.cpu.object_code import undefined_symbols
from services.engine.kernels.cpu.register_tiles import Arithmetic
from tests.machine import BFLOAT16, needs

ROOT = Path(__file__).parents[3]
RUN = """
import ctypes, hashlib, json, sys
from numba.core.event import install_recorder
from services.engine.kernels.cpu import small
with install_recorder("numba:compile") as compilations:
    if sys.argv[1] == "all":
        import torch
        from tests.engine.kernels.test_packed_linear import make, random
        from tests.engine.test_attention import BACKENDS, Case
        Case.backend = staticmethod(BACKENDS["cpu"])
        linear, x = make(640, 768, torch.bfloat16), random(97, 768, dtype=torch.bfloat16)
        results = [linear(x), linear.gated(x, torch.nn.functional.silu)]
        for pair in Case([50, 20, 90], [1, 20, 33], dtype=torch.bfloat16).run():
            results += pair
        result = b"".join(tensor.float().numpy().tobytes() for tensor in results)
        address = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    else:
        address, result = small.make_store_kv(sys.argv[1]).address, b""
print(json.dumps([len(compilations.buffer), hashlib.sha256(result).hexdigest(), address]))
"""


def run(cache_home: Path, what: str, *, root: Path = ROOT, isa: str = AUTO, hash_seed: int = 0) -> tuple[int, str, int]:
    """How much a process of its own compiled; a digest of what kernels computed; an address in it."""
    added = {
        "XDG_CACHE_HOME": str(cache_home),
        "PYTHONPATH": str(root),
        CPU_ISA_VARIABLE: isa,
        "PYTHONHASHSEED": str(hash_seed),
    }
    command = [sys.executable, "-c", RUN, what]
    found = subprocess.run(command, cwd=root, env={**os.environ, **added}, stdout=subprocess.PIPE, check=True).stdout
    compilations, digest, address = json.loads(found)
    return compilations, digest, address


def entries(cache_home: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (cache_home / "baton" / "kernels").iterdir()}


@pytest.mark.long
def test_a_second_process_compiles_nothing_and_computes_the_same(tmp_path: Path) -> None:
    """Products and both kinds of attention. Addresses differ, but the code that two processes compile does not: there
    is none in it.
    """
    first, second = (run(tmp_path / "one", "all", hash_seed=seed) for seed in (1, 2))
    another = run(tmp_path / "another", "all", hash_seed=3)
    assert first[0] == another[0] > 0
    assert second[0] == 0
    assert first[1] == second[1] == another[1]
    assert first[2] not in (second[2], another[2]), "addresses are not random here: the test shows nothing"
    assert entries(tmp_path / "one") == entries(tmp_path / "another")


@pytest.mark.long
def test_processes_that_start_together(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as executor:
        both = list(executor.map(lambda _: run(tmp_path, "float32"), range(2)))
    assert all(compilations > 0 for compilations, _, _ in both), "one was too late: the test shows nothing"
    assert len(entries(tmp_path)) == 1
    assert run(tmp_path, "float32")[0] == 0


@pytest.mark.long
def test_other_parameters_are_compiled(tmp_path: Path) -> None:
    run(tmp_path, "float32")
    assert run(tmp_path, "bfloat16")[0] > 0
    assert len(entries(tmp_path)) == 2


@pytest.mark.long
@needs(BFLOAT16)
def test_another_class_of_processors_is_compiled_for(tmp_path: Path) -> None:
    run(tmp_path, "float32", isa="avx512")
    assert run(tmp_path, "float32", isa="avx2")[0] > 0
    assert run(tmp_path, "float32", isa="avx512")[0] == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("changed", ["vectors.py", "amx/matmul.py"])
def test_changed_sources_are_compiled(tmp_path: Path, changed: str) -> None:
    """Of any module beside kernels: what a kernel is made of is not looked for. `matmul.py` is the name of two."""
    root = tmp_path / "other"
    for package in ("services", "kvtransfer", "protos"):
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    run(tmp_path, "float32")
    assert run(tmp_path, "float32", root=root)[0] == 0
    with open(root / "services" / "engine" / "kernels" / "cpu" / changed, "a") as file:
        file.write("# a comment\n")
    assert run(tmp_path, "float32", root=root)[0] > 0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodeDirectory:
    """For this process's kernels."""
    store = CodeDirectory(tmp_path / "kernels")
    monkeypatch.setattr(code_store, "the_code_store", lambda: store)
    return store


def compilations_of(make: Callable[[], Any]) -> int:
    with install_recorder("numba:compile") as compilations:
        make()
    return len(compilations.buffer)


def make() -> Any:
    return small.make_store_kv("float32")


def test_a_damaged_entry_is_compiled_anew_and_replaced(store: CodeDirectory) -> None:
    assert compilations_of(make) > 0
    (entry,) = store.path.iterdir()
    kept = entry.read_bytes()
    entry.write_bytes(kept[:-1])
    assert compilations_of(make) > 0
    assert entry.read_bytes() != kept[:-1]  # nor need it be `kept`: numba counts functions in their symbols
    assert compilations_of(make) == 0


def object_that_calls(callee: str, symbol: str) -> bytes:
    source = f"declare void @{callee}() define void @{symbol}(ptr %a) {{ call void @{callee}() ret void }}"
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine()
    code: bytes = machine.emit_object(binding.parse_assembly(source))
    return code


def test_code_that_refers_to_what_is_not_there_is_compiled_anew(store: CodeDirectory) -> None:
    """LLVM would end the process."""
    make()
    (entry,) = store.path.iterdir()
    good = store.find(entry.name)
    assert good is not None
    assert set(undefined_symbols(good)) == set()
    caller = object_that_calls("baton_not_there", symbol=entry.name)
    assert set(undefined_symbols(caller)) == {"baton_not_there"}
    store.keep(entry.name, caller)
    assert compilations_of(make) > 0
    assert store.find(entry.name) != caller


def test_the_parameters_of_a_maker_are_its_key() -> None:
    def maker(dtype: str, count: int, arithmetic: Arithmetic, *, gated: bool = False) -> None: ...

    symbol = compiled._symbol(maker, "float32", 16, Arithmetic.PAIRS)
    assert symbol == compiled._symbol(maker, "float32", count=16, arithmetic=Arithmetic.PAIRS, gated=False)
    others = [
        compiled._symbol(maker, "bfloat16", 16, Arithmetic.PAIRS),
        compiled._symbol(maker, "float32", 32, Arithmetic.PAIRS),
        compiled._symbol(maker, "float32", 16, Arithmetic.SINGLES),
        compiled._symbol(maker, "float32", 16, Arithmetic.PAIRS, gated=True),
    ]
    assert len({symbol, *others}) == 5
    with pytest.raises(AssertionError):
        compiled._symbol(maker, "float32", object(), Arithmetic.PAIRS)
