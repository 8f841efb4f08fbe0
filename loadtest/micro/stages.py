"""Prompts on a model's stages, in turns with one process and with ranks that have as many threads."""

from pathlib import Path

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp


def measure(model: Path | None, stages: int, rounds: int) -> list[Record]:
    """Returns a record for each length of a prompt."""
    if model is None:
        from services.launcher import demo_model

        model = demo_model.find().path
    load_openmp()  # before torch is imported
    from loadtest.micro import stage_turns

    return stage_turns.measure(model, stages, rounds)
