"""The memory that a load takes at most: the weights, and little beside them."""

import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from services.config import Dtype, LoadFormat, ShareWeights
from services.config.engine import EngineConfig
from services.engine.kernels.cpu import code_store
from services.engine.runner.load import load_runner
from services.engine.runner.memory import keep_freed_memory
from services.engine.runner.progress import WEIGHTS
from tests.checkpoints import edit_json, write_checkpoint
from tests.engine.sharing import Told
from tests.forkserver import FORKSERVER

# The sizes of a layer of SmolLM2's 135M parameters; what is freed of each is 10 MiB, in four pieces.
WIDTH, INNER, NUM_LAYERS = 576, 1536, 6
BESIDE_BYTES = 10 << 20  # rests of huge pages; without `freed_at_once` 27 MiB or more


class Watched(Told):
    """`Progress` that remembers the most memory, beyond that at the beginning, after any tensor was read."""

    def __init__(self) -> None:
        super().__init__()
        self._before = self.most = 0

    def stage(self, name: str, num_bytes: int | None = None) -> None:
        if name == WEIGHTS:
            self._before = own_bytes()

    def advance(self, num_bytes: int) -> None:
        super().advance(num_bytes)
        self.most = max(self.most, own_bytes() - self._before)


def own_bytes() -> int:
    """Returns this process's memory that is no file's, shared weights included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def engine_of(directory: Path, share: ShareWeights) -> EngineConfig:
    return EngineConfig(
        model=directory,
        dtype=Dtype.BFLOAT16,
        load_format=LoadFormat.DUMMY,
        share_weights=share,
        kv_memory_bytes=4 << 20,
        num_threads=1,
    )


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("share", [ShareWeights.ON, ShareWeights.OFF])
def test_what_is_freed_while_a_model_is_read_is_returned_at_once(share: ShareWeights, tmp_path: Path) -> None:
    """In a process of its own, whose heap has no room of other tests."""
    pipe, others = FORKSERVER.Pipe()
    small, large = (config_of(tmp_path / str(layers), num_hidden_layers=layers) for layers in (1, NUM_LAYERS))
    process = FORKSERVER.Process(target=_load, args=(small, large, share, tmp_path / "cache", others), daemon=True)
    process.start()
    others.close()
    most, read = pipe.recv()
    process.join()
    assert read > NUM_LAYERS * 3 * INNER * WIDTH * 2, "in bfloat16"
    assert most < read + BESIDE_BYTES


def config_of(path: Path, **settings: int) -> Path:
    """Writes config.json alone, of a model with layers of these sizes."""
    whole, bare = write_checkpoint(path / "whole"), path / "bare"
    bare.mkdir()
    shutil.copy(whole / "config.json", bare)
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": INNER, **heads, **settings}
    edit_json(bare / "config.json", **sizes)
    return bare


def _load(small: Path, large: Path, share: ShareWeights, cache: Path, pipe: Connection) -> None:
    code_store.the_code_store()
    os.environ["XDG_CACHE_HOME"] = str(cache)  # weights are shared in this process alone
    keep_freed_memory()  # as workers do
    load_runner(engine_of(small, share))  # kernels are there, and what they take
    watched = Watched()
    load_runner(engine_of(large, share), watched)
    pipe.send((watched.most, watched.num_bytes))
