"""Figures of one run by all that measure it: the client, the gateway's histograms, its records, and its console.

`baton bench` sends the load to a running `baton up` that nobody else uses; its means are held against those of the
others, over the same requests. Records and rows are of the newest requests, of which the gateway keeps some thousands.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from loadtest.tables import Record, table

_SAMPLES_S = 12.0  # after this, the console has two samples that began after the run
_TIMEOUT_S = 30.0
_FIGURES = {"TTFT, ms": "ttft", "ITL, ms": "itl", "end to end, ms": "e2e"}


@dataclass
class Feed:
    """The console's samples and rows since it is followed."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    begun: threading.Event = field(default_factory=threading.Event)

    def follow(self, admin: str) -> None:
        """Reads events until the process ends."""
        name = ""
        with urlopen(f"{admin}/console/feed", timeout=_TIMEOUT_S) as stream:
            for line in stream:
                key, _, value = line.decode().rstrip("\n").partition(": ")
                if key == "event":
                    name = value
                elif key == "data":
                    self._take(name, json.loads(value))

    def _take(self, name: str, event: dict[str, Any]) -> None:
        if name == "tick":
            self.begun.set()
        elif name == "sample" and self.begun.is_set():
            self.samples.append(event)
        elif name == "requests" and self.begun.is_set():
            self.rows |= {row["n"]: row for row in event["rows"]}


def main(arguments: list[str]) -> int:
    """Runs a load and prints the table. Further options are those of `baton bench`."""
    parser = argparse.ArgumentParser(prog="python -m loadtest agreement", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the API")
    parser.add_argument("--admin-url", default="http://127.0.0.1:9001", help="of the same gateway's admin port")
    options, others = parser.parse_known_args(arguments)
    feed, admin = Feed(), options.admin_url.rstrip("/")
    threading.Thread(target=feed.follow, args=(admin,), daemon=True).start()
    feed.begun.wait(_TIMEOUT_S)
    before = _totals(admin)
    bench = _bench(options.url, others)
    time.sleep(_SAMPLES_S)
    after = _totals(admin)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    number = bench["requests"]
    records = json.loads(_read(f"{admin}/debug/requests"))["requests"][:number]
    sys.stdout.write(table(_compare(bench, grown, records, feed)))
    return 0


def _bench(url: str, others: list[str]) -> dict[str, Any]:
    """Runs `baton bench` and returns its figures."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "bench.json"
        command = [sys.executable, "-m", "services.cli", "bench", "--url", url, "--warmup", "0", "--json", str(path)]
        subprocess.run([*command, *others], check=True, stdout=subprocess.DEVNULL)
        figures: dict[str, Any] = json.loads(path.read_text())
    return figures


def _totals(admin: str) -> dict[str, float]:
    """Returns the sums and counts of the histograms, and tokens, by name."""
    families = text_string_to_metric_families(_read(f"{admin}/metrics"))
    totals: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def _compare(bench: dict[str, Any], grown: dict[str, float], records: list[dict[str, Any]], feed: Feed) -> list[Record]:
    found = []
    for words, name in _FIGURES.items():
        metric, bounds = f"baton_{name}_seconds", [sample[name] for sample in feed.samples]
        of_records = {"ttft": "ttft_ms", "e2e": "duration_ms"}.get(name)
        of_rows = {"ttft": "ttft_ms", "e2e": "ms"}.get(name)
        line: Record = {"figure": words, "client": bench[f"{name}_ms"]["mean"]}
        line["histogram"] = 1e3 * grown[f"{metric}_sum"] / grown[f"{metric}_count"]
        if of_records and of_rows:
            line["records"] = _mean([record[of_records] for record in records])
            line["rows"] = _mean([row[of_rows] for row in feed.rows.values()])
        seconds = sum(sample["sums"][name] for sample in feed.samples)
        line["samples"] = 1e3 * seconds / sum(map(sum, bounds))
        found.append(line)
    tokens: Record = {"figure": "tokens generated", "client": bench["output_tokens"]}
    tokens["histogram"] = grown["baton_generated_tokens_total"]
    tokens["records"] = sum(record["generated_tokens"] for record in records)
    tokens["rows"] = sum(row["generated"] for row in feed.rows.values())
    tokens["samples"] = sum(sample["generated_tokens"] for sample in feed.samples)
    return [*found, tokens]


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def _read(url: str) -> str:
    with urlopen(url, timeout=_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
        return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
