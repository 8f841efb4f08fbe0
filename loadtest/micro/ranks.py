"""Steps of a model on several ranks, in turns with the same steps in one process that has as many threads."""

from pathlib import Path

from loadtest.tables import Record
from services.engine.kernels.cpu.openmp import load_openmp


def measure(model: Path | None, ranks: int, context: int, rounds: int) -> list[Record]:
    """Returns a record for each kind of step."""
    if model is None:
        from services.launcher import demo_model

        model = demo_model.find().path
    load_openmp()  # before torch is imported
    from loadtest.micro import rank_turns

    return rank_turns.measure(model, ranks, context, rounds)
