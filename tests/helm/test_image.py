"""The Dockerfile, as far as it can be judged without building it: it fits the chart and the repository."""

import re
import tomllib

import pytest
import yaml

from tests.helm.chart import CHART, ROOT, Helm, containers
from tests.image.dockerfile import Context, Dockerfile, Instruction, read_dockerfile

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FINAL = ["cpu", "cuda"]
_LABEL = "org.opencontainers.image"


@pytest.fixture(scope="module")
def dockerfile() -> Dockerfile:
    return read_dockerfile()


def chain(dockerfile: Dockerfile, name: str) -> list[Instruction]:
    """All instructions of a stage and of those below it."""
    return [each for stage in dockerfile.chain(name) for each in stage.instructions]


@pytest.mark.parametrize("name", FINAL)
def test_an_image_ends_as_the_user_that_the_chart_names(dockerfile: Dockerfile, name: str):
    user = yaml.safe_load((CHART / "values.yaml").read_text())["runAsUser"]
    steps = chain(dockerfile, name)
    assert steps[-1] == Instruction("USER", f"{user}:{user}")
    assert [each for each in steps if each.name == "RUN" and f"useradd --uid {user} " in each.value]


def test_the_chart_and_the_image_name_the_version_that_is_built(dockerfile: Dockerfile):
    version = PROJECT["project"]["version"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
    (labels,) = dockerfile.stages["runtime"].all_of("LABEL")
    assert f'{_LABEL}.version="{version}"' in labels
    assert f'{_LABEL}.licenses="{PROJECT["project"]["license"]}"' in labels
    assert f'{_LABEL}.description="{PROJECT["project"]["description"]}"' in labels


def test_the_one_without_a_target_is_for_cpus(dockerfile: Dockerfile):
    assert list(dockerfile.stages)[-1] == "cpu"


def test_all_stages_begin_with_one_base_that_an_argument_names(dockerfile: Dockerfile):
    assert [each.value.partition("=")[0] for each in dockerfile.arguments] == ["BASE"]
    assert {dockerfile.chain(name)[0].base for name in dockerfile.stages} == {"${BASE}"}


@pytest.mark.parametrize("name", FINAL)
def test_an_image_has_nothing_of_the_stages_that_build_but_the_environment(dockerfile: Dockerfile, name: str):
    copied = [each.value for each in chain(dockerfile, name) if each.name in ("COPY", "ADD")]
    assert copied == [f"--from=build-{name} /opt/baton /opt/baton"]


def test_no_secret_is_an_argument_a_variable_or_a_label(dockerfile: Dockerfile):
    steps = [each for stage in dockerfile.stages.values() for each in stage.instructions]
    kept = [each.value for each in steps if each.name in ("ARG", "ENV", "LABEL")]
    assert kept
    assert [each for each in kept if re.search(r"token|secret|password|api_?key|credential", each, re.IGNORECASE)] == []


def test_docker_is_sent_what_the_dockerfile_copies_and_the_packages_that_are_built(dockerfile: Dockerfile):
    copies = [value for stage in dockerfile.stages.values() for value in stage.all_of("COPY")]
    copied = {source for value in copies if not value.startswith("--from=") for source in value.split()[:-1]}
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    files = [path for source in copied for path in Context().files(source)]
    assert [path for path in files if "__pycache__" in path.parts] == []
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied


@pytest.mark.parametrize("name", FINAL)
def test_all_that_is_written_is_in_volumes_which_the_chart_mounts(dockerfile: Dockerfile, helm: Helm, name: str):
    """The root is read-only there."""
    steps = chain(dockerfile, name)
    volumes = {place for each in steps if each.name == "VOLUME" for place in each.words()}
    variables = " ".join(each.value for each in steps if each.name == "ENV")
    homes = set(re.findall(r"(?:CACHE_HOME|CACHE_DIR|HF_HOME)=(\S+)", variables))
    assert len(homes) == 3
    assert [home for home in homes if not any(f"{home}/".startswith(f"{place}/") for place in volumes)] == []
    of_image = (container for _, container in containers(helm.render()) if container["image"].startswith("baton:"))
    images = [container for container in of_image if "command" not in container]  # not the helm test's
    assert len(images) == 3
    for container in images:
        assert volumes <= {mount["mountPath"] for mount in container["volumeMounts"]}
