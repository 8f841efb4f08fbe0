"""Writes the boards for Grafana into the chart: `python -m helm.boards`, which `make chart` runs."""

from pathlib import Path

from helm.boards.cache import make_cache
from helm.boards.fleet import make_fleet
from helm.boards.grafana import as_json
from helm.boards.handoffs import make_handoffs
from helm.boards.latency import make_latency
from helm.boards.metric_table import read_metrics
from helm.boards.queries import Queries

FOLDER = Path(__file__).parents[1] / "baton" / "files" / "boards"


def make_files() -> dict[str, str]:
    """Makes the text of each board, by the name of its file. Raises ValueError where one asks for no metric."""
    queries = Queries(read_metrics())
    boards = [make(queries) for make in (make_fleet, make_latency, make_cache, make_handoffs)]
    return {f"{board.name}.json": as_json(board, queries.meaning) for board in boards}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in make_files().items():
        (FOLDER / name).write_text(text)
