"""Where a step's time goes in the model itself, beside what memory and matrix units of the machine allow."""

from pathlib import Path

from loadtest.micro.rows import Row
from services.engine.openmp import load_openmp


def measure(model: Path | None, context: int) -> list[Row]:
    """Rows for each batch: its parts, then the whole step."""
    if model is None:
        raise SystemExit("name a checkpoint with --model")
    load_openmp()  # before torch is imported
    from loadtest.micro import model_parts

    return model_parts.measure(model, context)
