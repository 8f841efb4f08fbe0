"""The helm program, for the whole run."""

import pytest

from tests.helm.chart import Helm, find_helm
from tests.machine import miss


@pytest.fixture(scope="session")
def helm(pytestconfig: pytest.Config) -> Helm:
    """Without helm and npm the tests of the chart are skipped; not in continuous integration, which must run them."""
    assert pytestconfig.cache is not None
    found = find_helm(pytestconfig.cache.mkdir("helm"))
    if found is not None:
        return found
    miss("there is no helm on PATH, and no npm to install it with")
