"""Jobs beside a gateway end by what they compute, not by how long the machine takes for it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.gateway.side import processes

_PATIENCE_S = 120.0


@pytest.fixture(scope="session", autouse=True)
def patient_jobs() -> Iterator[None]:
    """Lets jobs wait for processors, and for each other, as long as they like: their CPU time alone ends them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_SHORT", "_LONG"):
            patch.setattr(processes, name, replace(getattr(processes, name), wall_s=_PATIENCE_S))
        patch.setattr(processes, "_MAX_WAIT_S", _PATIENCE_S)
        yield
