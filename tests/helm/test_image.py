"""The Dockerfile, as far as it can be judged without building it: it fits the chart and the repository."""

import re
import tomllib

import yaml

from tests.helm.chart import CHART, ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_it_runs_as_the_user_that_the_chart_names():
    user = yaml.safe_load((CHART / "values.yaml").read_text())["runAsUser"]
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == [f"{user}:{user}"]
    assert f"useradd --uid {user} " in DOCKERFILE


def test_the_chart_names_the_version_that_is_built():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project["version"]


def test_docker_is_sent_what_the_dockerfile_copies_and_the_packages_that_are_built():
    copied = {
        source
        for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
        for source in words.split()[:-1]
    }
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    assert [name for name in copied if not (ROOT / name).exists()] == []
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert set(build["targets"]["wheel"]["packages"]) <= copied
