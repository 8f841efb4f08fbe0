"""A machine without numba computes the same, by torch's operations, and says so."""

import subprocess
import sys
from pathlib import Path

import torch

from services.config import DeviceKind
from services.config.engine import EngineConfig
from services.engine.runner.load import load_runner
from tests.checkpoints import write_checkpoint
from tests.engine.stepping import run_greedy

PROMPT = list(range(5, 40))
WITHOUT = """
import sys
from pathlib import Path

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(name)

from services.config import DeviceKind
from services.config.engine import EngineConfig
from services.engine.runner.load import load_runner
from tests.engine.stepping import run_greedy
assert not {"numba", "llvmlite"} & sys.modules.keys()
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "numba" else found(name, *rest)
sys.meta_path.insert(0, Hidden())
engine = EngineConfig(model=Path(sys.argv[1]), device=DeviceKind.CPU, kv_memory_bytes=8 << 20, num_threads=1)
loaded = load_runner(engine)
print(loaded.kernels, loaded.notices)
prompt = [int(token) for token in sys.argv[2].split(",")]
print(run_greedy(loaded.runner, [prompt], max_tokens=20, chunk=16)[0].generated)
"""


def test_it_runs_and_says_so(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", dtype=torch.float32)
    fused = load_runner(EngineConfig(model=directory, device=DeviceKind.CPU, kv_memory_bytes=8 << 20, num_threads=1))
    assert fused.notices == ()
    command = [sys.executable, "-c", WITHOUT, str(directory), ",".join(map(str, PROMPT))]
    notices, tokens = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert notices.startswith("torch ")
    assert "numba is not installed" in notices
    assert tokens == str(run_greedy(fused.runner, [PROMPT], max_tokens=20, chunk=16)[0].generated)
