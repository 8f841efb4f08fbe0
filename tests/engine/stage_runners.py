"""Runners of all stages of a model in one process: each stage runs all pieces of a step before the next one begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from services.engine.models.architectures import parse_model_config
from services.engine.models.model_config import ModelConfig, layers_of_stages
from services.engine.models.registry import load_weights, open_tensors
from services.engine.runner.base import StepInput, StepOutput, spare_blocks
from services.engine.runner.cpu.attention import StoredKv
from services.engine.runner.cpu.place import Place
from services.engine.runner.cpu.stage import Stage, memory_bytes
from services.engine.runner.cpu.torch_runner import TorchRunner
from services.engine.runner.load_plan import kv_layout
from services.protocol.model_files.open import open_model

NUM_BLOCKS, BLOCK_SIZE = 160, 16
MAX_TOKENS = 512


@dataclass
class StageRunners:
    """The stages of a model, the one with the last layers first: a `Runner` of what tests need."""

    runners: Sequence[TorchRunner]

    def __post_init__(self) -> None:
        self.num_blocks = self.runners[0].num_blocks
        self.layout = self.runners[0].layout

    def launch(self, step: StepInput) -> None:
        for runner in reversed(self.runners[1:]):
            runner.follow(step.tokens, step.parts, samples_all=step.samples_all)
        self.runners[0].launch(step)

    def collect(self) -> StepOutput:
        return self.runners[0].collect()


def config_of(path: Path) -> ModelConfig:
    return parse_model_config(open_model(path).config())


def stage_runners(path: Path, num_stages: int, dtype: torch.dtype = torch.float32, *, fused: bool = True) -> Any:
    """Makes them, over pools of their own layers, or one of slices."""
    whole = config_of(path)
    memory = np.zeros(memory_bytes(num_stages, MAX_TOKENS, whole.hidden_size, dtype.itemsize), dtype=np.uint8)
    layout = kv_layout(whole, BLOCK_SIZE, dtype)
    slices = None  # which all stages have together
    if layout.groups is not None:
        slices = np.zeros(spare_blocks(NUM_BLOCKS, BLOCK_SIZE, layout.num_slices).stop * layout.block_bytes, np.uint8)
    runners = []
    for number, layers in enumerate(layers_of_stages(whole.num_layers, num_stages)):
        config = whole.shard(0, 1, layers)
        with open_tensors(path, whole, torch.device("cpu")) as tensors:
            weights = load_weights(tensors, config, dtype, fused=fused)
        heads = range(whole.num_kv_heads)
        own = layout.part(heads, layers if layout.groups is None else None)
        stage = Stage(memory, number, num_stages, whole.hidden_size, dtype, _nobody_is_late)
        place = Place(stage=stage, pool=slices)
        runners.append(TorchRunner(config, weights, NUM_BLOCKS, BLOCK_SIZE, kv=StoredKv(own), fused=fused, place=place))
    return StageRunners(runners)


def _nobody_is_late() -> None:
    raise AssertionError("a stage waits for a piece that the stage before has done")
