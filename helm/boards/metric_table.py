"""The table of metrics in docs/reference.md. A test holds it to what a gateway registers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"

Kind = Literal["counter", "gauge", "histogram"]

_ROW = re.compile(
    r"^\| `(?P<name>baton_\w+)` \| (?P<kind>\w+) \| (?P<labels>[^|]*)\| (?P<meaning>.*) \|$", re.MULTILINE
)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as the table describes it. meaning: words for a person, without links."""

    name: str
    kind: Kind
    labels: frozenset[str]
    meaning: str


def read_metrics(document: Path = REFERENCE) -> Mapping[str, Metric]:
    """Returns the metrics of the section `Metrics`, by name. Raises ValueError for a kind that is none."""
    _, _, section = document.read_text().partition("\n## Metrics\n")
    found = {}
    for row in _ROW.finditer(section.partition("\n## ")[0]):
        if row["kind"] not in get_args(Kind):
            raise ValueError(f"{row['name']} is no {row['kind']} of Prometheus")
        labels = frozenset(re.findall(r"`(\w+)`", row["labels"]))
        found[row["name"]] = Metric(row["name"], row["kind"], labels, _LINK.sub(r"\1", row["meaning"]))  # type: ignore[arg-type]
    return found
