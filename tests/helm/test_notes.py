"""What helm says after an installation: the next three commands, and what is open to whom."""

import re
import shutil
from pathlib import Path

import pytest

from tests.helm.chart import CHART, EVERYTHING, EXTERNAL_REDIS, KEYS, MTLS, Helm, of_kind
from tests.helm.test_chart import each_case

# `helm template` renders the notes and shows them nowhere: here they are a manifest.
SHOWN = """
apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data: {notes: {{ tpl (.Files.Get "notes.txt") . | toJson }}}
"""


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("chart") / "baton"
    shutil.copytree(CHART, copy)
    (copy / "templates/NOTES.txt").rename(copy / "notes.txt")
    (copy / "templates/notes.yaml").write_text(SHOWN)
    return copy


def notes_of(helm: Helm, chart: Path, case: Path | None, *options: str) -> str:
    notes: str = of_kind(helm.render(case, *options, chart=chart), "ConfigMap")["notes"]["data"]["notes"]
    return notes


@each_case
def test_there_are_three_commands_about_things_that_are_there(helm: Helm, chart: Path, case: Path | None):
    notes, manifests = notes_of(helm, chart, case), helm.render(case)
    commands = re.findall(r"^  (.+)$", notes, re.MULTILINE)
    assert len(commands) == 3
    named = set(re.findall(r"(deployment|service|secret)[/ ]([\w-]+)", " ".join(commands)))
    assert {kind for kind, _ in named} >= {"deployment", "service"}
    own = {"baton-test-key"}
    for kind, name in named:
        assert name in own | set(of_kind(manifests, kind.title()))
    assert "\n\n\n" not in notes


def test_what_is_plain_text_or_open_is_said(helm: Helm, chart: Path):
    assert "PLAIN TEXT between gateways, workers and Redis" in notes_of(helm, chart, None)
    assert "NO KEYS" not in notes_of(helm, chart, None)
    for case in (MTLS, EVERYTHING):
        notes = notes_of(helm, chart, case)
        assert not re.search("PLAIN TEXT|NO KEYS|NO NETWORK POLICIES", notes)
        assert "https://" in notes
    assert "PLAIN TEXT between clients and gateways" in notes_of(helm, chart, KEYS)
    anonymous = notes_of(helm, chart, EXTERNAL_REDIS, "--set", "keys.allowAnonymous=true,networkPolicy.enabled=false")
    assert "NO KEYS: who reaches the Service can use the model, and it is open beyond the cluster" in anonymous
    assert "NO NETWORK POLICIES" in anonymous
