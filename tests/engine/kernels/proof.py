"""A model's steps, and what computed them: the kernels with their machine code, and torch's operators."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, float32
from torch.utils._python_dispatch import TorchDispatchMode

from services.config import DeviceKind, Dtype
from services.config.engine import EngineConfig
from services.engine.runner.base import Runner, SamplingBatch, StepOutput
from services.engine.runner.cpu import torch_runner
from services.engine.runner.cpu.sampler import Mask, sample
from services.engine.runner.load import load_runner
from tests.engine.kernels.machine_code import assembly_of, name_of
from tests.engine.stepping import Row, step

_CHUNK = 100


@dataclass(frozen=True, eq=False)
class Proof:
    """What a run was made of. Answers are given, so that runs of all classes see the same tokens."""

    kernels: str  # as LoadedModel says
    likeliest: list[list[int]]  # of each prompt, the token after it and after each token of its answer but the last
    logits: np.ndarray  # float32[tokens, vocab], of these
    operators: frozenset[str]  # of torch that ran in steps
    code: dict[str, str]  # the assembly of each kernel that ran, by `module.maker`


def prove(directory: Path, dtype: str, prompts: list[list[int]], answers: list[list[int]], **options: Any) -> Proof:
    """Runs prompts by chunks, then their answers token by token."""
    chosen = EngineConfig(
        model=directory, device=DeviceKind.CPU, dtype=Dtype(dtype), kv_memory_bytes=8 << 20, num_threads=1, **options
    )
    with pytest.MonkeyPatch.context() as patch:
        logits = _watch_logits(patch)
        loaded = load_runner(chosen)
        watched, kernels = _Operators(), _watch_kernels(patch) if loaded.kernels != "torch" else {}
        rows = _run(loaded.runner, prompts, answers, watched, logits)
    return Proof(
        kernels=loaded.kernels,
        likeliest=[np.stack(row).argmax(axis=-1).tolist() for row in rows],
        logits=np.concatenate([np.stack(row) for row in rows]),
        operators=frozenset(watched.names),
        code={name: "".join(map(assembly_of, some)) for name, some in _with_tiles(kernels, dtype).items()},
    )


def _run(
    runner: Runner, prompts: list[list[int]], answers: list[list[int]], watched: "_Operators", logits: list[np.ndarray]
) -> list[list[np.ndarray]]:
    """Of each prompt, the logits of its tokens."""
    blocks = np.array_split(np.random.default_rng(0).permutation(runner.num_blocks).astype(np.int32), len(prompts))
    rows = [Row(list(prompt), own, num_prompt=len(prompt)) for prompt, own in zip(prompts, blocks, strict=True)]
    found: list[list[np.ndarray]] = [[] for _ in rows]
    while active := [index for index, row in enumerate(rows) if len(found[index]) < len(answers[index])]:
        logits.clear()
        with watched:
            step(runner, [rows[index] for index in active], _CHUNK)
        sampled = [index for index in active if len(rows[index].generated) > len(found[index])]
        for index, own in zip(sampled, np.concatenate(logits) if sampled else (), strict=True):
            rows[index].tokens[-1] = answers[index][len(found[index])]
            found[index].append(own)
    return found


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    """Names of operators that ran in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(operator.overloadpacket))
        return operator(*args, **(kwargs or {}))


def _watch_logits(patch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What is sampled from, from now on."""
    seen: list[np.ndarray] = []

    def watched(logits: Tensor, batch: SamplingBatch, mask: Mask) -> StepOutput:
        seen.append(logits.to(float32).numpy().copy())
        return sample(logits, batch, mask)

    patch.setattr(torch_runner, "sample", watched)
    return seen


def _watch_kernels(patch: pytest.MonkeyPatch) -> dict[str, set[Any]]:
    """Those that run from now on, by what made them."""
    from services.engine.kernels.cpu.team import Team

    run = Team.run
    seen: dict[str, set[Any]] = {}

    def watched(self: Team, kernel: Any, *arguments: Any, **options: Any) -> None:
        seen.setdefault(name_of(kernel), set()).add(kernel)
        run(self, kernel, *arguments, **options)

    patch.setattr(Team, "run", watched)
    return seen


def _with_tiles(kernels: dict[str, set[Any]], dtype: str) -> dict[str, set[Any]]:
    """With the functions for register tiles that they call, which they do by symbol."""
    if not kernels:
        return {}
    from services.engine.kernels.cpu.register_tiles import Arithmetic, _tile_function, arithmetic_of

    own = arithmetic_of(dtype)
    tiles = [_tile_function(each) for each in {own, own if own is Arithmetic.PAIRS else Arithmetic.SINGLES}]
    return {
        name: some | {tile for tile in tiles if any(tile.symbol in assembly_of(kernel) for kernel in some)}
        for name, some in kernels.items()
    }
