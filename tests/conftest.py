"""How a run goes: in which order, until when, on which processor, and what is told of it."""

import gc
import os
import signal
import time
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests import machine
from tests.e2e.ranks import RANKS_VARIABLE
from tests.faults.table import FaultTable
from tests.skip_guard import OUT_OF_TIME, SkipGuard, read_allowed

ALLOWED_SKIPS = Path(__file__).with_name("allowed_skips.txt")
LONG = {"long": "--long", "faults_long": "--long-faults"}  # marks of tests that run with an option alone
SLOWEST_LAST = (
    "helm",
    "launcher",
    "clients",
    "console",
    "e2e",
    "faults",
)  # folders, in the order in which they run last
TOGETHER = {  # how node ids begin; tests of one value run in one process, so that what takes long starts once
    "tests/clients/": "clients",
    "tests/console/": "console",
    "tests/e2e/test_demo_model.py": "demo model",
    "tests/e2e/": "workers",
    "tests/rules/": "rules",
    "tests/faults/": "faults",
    "tests/helm/test_processes.py": "workers",
    "tests/helm/test_tls_processes.py": "workers",
    "tests/gpu/test_compiles.py": "compiler",
    "tests/engine/kernels/test_classes.py": "classes",
    "tests/engine/kernels/test_inner_loops.py": "classes",
}

# Several test processes share the cores, and so do the workers that they start: no thread may spin against the others.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What the processor has is tested, less what `--hide-cpu-feature` hides.
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
# Triton asks for this when it is first imported, which torch and others do when they please.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a shell's background job. Children would inherit it, and Ctrl-C be no way to end them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.addinivalue_line("markers", "needs(feature): needs a feature of the machine, see tests/machine.py")
    config.addinivalue_line("markers", "fault_row(number): shows a row of tests/faults/rows.py")
    config.addinivalue_line("markers", "long: runs with --long alone, as continuous integration has it")
    config.addinivalue_line("markers", "faults_long: runs with --long-faults alone")
    config.addinivalue_line("markers", "few(n): of its parameters n run, all of them with --long")
    os.environ[RANKS_VARIABLE] = str(config.getoption("--ranks"))
    hidden: list[str] = config.getoption("--hide-cpu-feature")
    if hidden and os.environ.get("CI"):
        raise pytest.UsageError("--hide-cpu-feature: continuous integration runs what the processor can")
    for feature in hidden:
        machine.hide(feature)
        os.environ["ONEDNN_MAX_CPU_ISA"] = machine.ISA_WITHOUT[feature]  # for this process and those that it starts
    guard = SkipGuard(read_allowed(ALLOWED_SKIPS), machine.has, frozenset(hidden))
    config.pluginmanager.register(guard, "skip-guard")
    config.pluginmanager.register(FaultTable(), "fault-table")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-start-after",
        type=float,
        metavar="TIME",
        help="Unix time, in seconds, after which no test starts any more; those left out are counted at the end",
    )
    parser.addoption(
        "--newest",
        action="store_true",
        help="try clients in their newest versions, which `make test-clients ARGS=--newest` installs",
    )
    parser.addoption("--long", action="store_true", help="also run long tests, but those of tests/faults")
    parser.addoption(
        "--long-faults",
        action="store_true",
        help="also run the long ones of tests/faults, as `make test-faults` does",
    )
    parser.addoption(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="workers of the tests' stacks have so many ranks, where a test does not say how many",
    )
    parser.addoption(
        "--hide-cpu-feature",
        action="append",
        default=[],
        choices=sorted(machine.ISA_WITHOUT),
        help="run as if the processor had no such feature; tests that need it are skipped and counted apart",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [mark for mark, option in LONG.items() if not config.getoption(option)]
    long = {item for item in items if any(map(item.get_closest_marker, left_out))}
    if "long" in left_out:
        long |= _beyond_few([item for item in items if item not in long])
    config.hook.pytest_deselected(items=[item for item in items if item in long])
    items[:] = [item for item in items if item not in long]
    tests = Path(__file__).parent

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(tests).parts[0]
        return SLOWEST_LAST.index(folder) + 1 if folder in SLOWEST_LAST else 0

    items.sort(key=rank)


def _beyond_few(items: list[pytest.Item]) -> set[pytest.Item]:
    """Returns those items of tests marked `few(n)` that are left out: all but n of a test, evenly from its first on."""
    tests: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("few")) is not None:
            tests.setdefault((item.nodeid.partition("[")[0], mark.args[0]), []).append(item)
    beyond = set()
    for (_, few), of_test in tests.items():
        kept = {number * len(of_test) // few for number in range(few)}
        beyond |= {item for number, item in enumerate(of_test) if number not in kept}
    return beyond


def pytest_collection_finish() -> None:
    """Keeps what all tests have imported out of every later collection of garbage, as gateways and workers do."""
    gc.collect()
    gc.freeze()


class TogetherScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Deals single tests out to test processes; those that belong TOGETHER to the same one.

    By their names: groups as pytest-xdist 3.8 has them, by a marker, are not seen with pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        return next((group for start, group in TOGETHER.items() if nodeid.startswith(start)), nodeid)

    def _assign_work_unit(self, node: object) -> None:
        """Lets the first of several processes begin with what belongs together, from the end.

        Whole stacks wait more than they compute, so they run while the other processes compute, and not after them.
        """
        if self.numnodes > 1 and node is self.nodes[0]:
            groups = (scope for scope in reversed(self.workqueue) if scope in TOGETHER.values())
            self.workqueue.move_to_end(next(groups, next(iter(self.workqueue))), last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> TogetherScheduling:
    config.option.loadscopereorder = False  # else the largest groups come first
    return TogetherScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    last_start: float | None = item.config.getoption("--no-start-after")
    is_rerun = getattr(item, "execution_count", 1) > 1  # of pytest-rerunfailures: it failed, and must not end skipped
    if last_start is not None and time.time() > last_start and not is_rerun:
        pytest.skip(OUT_OF_TIME)
    for mark in item.iter_markers("needs"):
        machine.require(*mark.args)
