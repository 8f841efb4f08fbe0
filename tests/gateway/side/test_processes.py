"""Jobs in processes with limits: what is stopped, who waits for whom, and what is left when a process ends."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest

from services.gateway.side import processes as module
from services.gateway.side.frames import JobEnd, JobKind
from services.gateway.side.processes import LONGEST_S, MEMORY_BYTES, ForkerEnded, JobFailed, NoJobs, SideProcesses
from services.gateway.text.tokenizer import Tokenizer
from services.process.signals import ENDING
from services.process.supervised import supervised
from tests.gateway.running_processes import busy_ones, jobs_of, running_processes
from tests.gateway.tokenizer_files import byte_level
from tests.processes import is_alive, is_zombie

FOREVER = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "x"}]
PARENT = """
import asyncio
from tests.gateway.running_processes import running_processes
from tests.gateway.side.test_processes import FOREVER, TOKENIZER, started
async def main():
    async with running_processes(TOKENIZER) as processes:
        job = await started(processes, FOREVER)
        print(processes.forker_pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
TOKENIZER = Tokenizer(byte_level(), {})
LONG_S = 600.0  # longer than any test


@pytest.fixture
async def processes() -> AsyncIterator[SideProcesses]:
    async with running_processes(TOKENIZER) as running:
        await render(running, "")
        yield running


@pytest.fixture
def unending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs have far more time on a processor than a test takes: none ends by itself while the test looks at it."""
    monkeypatch.setattr(module, "_SHORT", replace(module._SHORT, cpu_s=LONG_S))


async def render(processes: SideProcesses, source: str, tenant: str = "a") -> dict[str, str]:
    job = {"source": source, "special_tokens": {}, "messages": MESSAGES, "options": {}}
    return await processes.do(JobKind.TEMPLATE, job, tenant)


async def started(processes: SideProcesses, source: str, tenant: str = "a") -> "asyncio.Task[dict[str, str]]":
    """Returns a job once a process has it."""
    if processes.forker_pid is None:
        await render(processes, "")
    while busy_ones(processes):  # of the job before, whose answer came ahead of its process's end
        await asyncio.sleep(0.01)
    job = asyncio.create_task(render(processes, source, tenant))
    while not busy_ones(processes):
        await asyncio.sleep(0.01)
        assert not job.done(), job.result()
    return job


async def test_a_job_ends_at_its_time_and_its_process_is_gone(processes: SideProcesses) -> None:
    with pytest.raises(JobFailed) as failed:
        await render(processes, FOREVER)
    assert failed.value.end is JobEnd.TIME
    assert not busy_ones(processes)
    assert await render(processes, "{{ messages[0].content }}") == {"text": "x"}


@pytest.mark.usefixtures("unending")
async def test_a_process_has_its_memory_and_no_more(processes: SideProcesses) -> None:
    job = await started(processes, FOREVER)
    (busy,) = busy_ones(processes)
    most, _ = busy.rlimit(psutil.RLIMIT_AS)
    assert busy.memory_info().vms <= most <= busy.memory_info().vms + MEMORY_BYTES
    assert busy.rlimit(psutil.RLIMIT_CORE) == busy.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    job.cancel()
    assert "cannot render" in (await render(processes, f"{{{{ 'a' * {2 * MEMORY_BYTES} }}}}"))["error"]


@pytest.mark.usefixtures("unending")
async def test_jobs_know_nothing_of_the_gateway_s_environment(
    processes: SideProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "secret")
    async with running_processes(TOKENIZER) as running:
        await started(running, FOREVER)
        assert running.forker_pid is not None
        for process in (psutil.Process(running.forker_pid), *jobs_of(running)):
            assert "BATON_API_KEY" not in process.environ()


@pytest.mark.usefixtures("unending")
async def test_a_job_that_nobody_waits_for_ends(processes: SideProcesses) -> None:
    job = await started(processes, FOREVER)
    (busy,) = busy_ones(processes)
    job.cancel()
    while is_alive(busy):
        await asyncio.sleep(0.01)
    assert await render(processes, "y") == {"text": "y"}


async def test_tenants_do_not_wait_for_each_other(processes: SideProcesses) -> None:
    slow = [asyncio.create_task(render(processes, FOREVER, "a")) for _ in range(8)]
    await asyncio.sleep(0.01)
    assert await render(processes, "b", "b") == {"text": "b"}
    assert sum(task.done() for task in slow) < len(slow), "short jobs of one tenant are not behind all of another's"
    with pytest.raises(JobFailed):
        await render(processes, FOREVER, "b")
    assert sum(task.done() for task in slow) < len(slow), "long jobs of one tenant are not behind all of another's"
    for task in slow:
        task.cancel()
    await asyncio.wait(slow)


@pytest.mark.usefixtures("unending")
async def test_a_process_that_is_killed_fails_its_job_alone(processes: SideProcesses) -> None:
    job = await started(processes, FOREVER)
    killed = jobs_of(processes)
    for each in killed:
        each.kill()
    while any(is_alive(each) for each in killed):
        await asyncio.sleep(0.01)
    with pytest.raises(NoJobs):  # it was not its own fault
        await job
    assert await render(processes, "y") == {"text": "y"}


@pytest.mark.usefixtures("unending")
async def test_a_job_that_the_processors_left_out_has_its_time_yet(processes: SideProcesses) -> None:
    job = await started(processes, FOREVER)
    (busy,) = busy_ones(processes)
    busy.suspend()
    await asyncio.sleep(1.5 * LONGEST_S)
    assert not job.done()
    busy.resume()
    job.cancel()


@pytest.mark.parametrize("tries", [1, 2])
async def test_a_job_that_has_waited_for_processors_for_too_long_is_tried_once_more(
    processes: SideProcesses, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    """What it lacked is no fault of its own, but for a try in which it used up its time."""
    starved = replace(module._SHORT, cpu_s=LONG_S, wall_s=0.05)
    monkeypatch.setattr(module, "_SHORT", starved)
    monkeypatch.setattr(module, "_LONG", starved if tries == 2 else replace(module._LONG, cpu_s=0.05))
    with pytest.raises(JobFailed if tries == 1 else NoJobs) as failed:
        await render(processes, FOREVER)
    assert not isinstance(failed.value, JobFailed) or failed.value.end is JobEnd.TIME


@pytest.mark.long
async def test_many_jobs_of_one_tenant_wait_for_each_other(processes: SideProcesses) -> None:
    answers = await asyncio.gather(*(render(processes, f"{number}") for number in range(100)))
    assert [answer["text"] for answer in answers] == [str(number) for number in range(100)]


@pytest.mark.parametrize("num_chars", [10, 1 << 20])  # less and more than a pipe takes before it is read
async def test_a_process_that_cannot_begin_leaves_nothing_and_fails_no_job_for_good(
    processes: SideProcesses, num_chars: int
) -> None:
    """There are files enough for a fork, and too few for what it opens."""
    assert processes.forker_pid is not None
    forker = psutil.Process(processes.forker_pid)
    while len(waiting := forker.children()) < 4:
        await asyncio.sleep(0.01)
    files, (soft, hard) = forker.num_fds(), forker.rlimit(psutil.RLIMIT_NOFILE)
    forker.suspend()
    for each in waiting:
        each.kill()
    forker.rlimit(psutil.RLIMIT_NOFILE, (files - len(waiting) + 2, hard))
    job = asyncio.create_task(render(processes, "x" * num_chars))
    await asyncio.sleep(0.01)
    forker.resume()
    with pytest.raises(NoJobs):
        await job
    forker.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))
    async with asyncio.timeout(60):  # until those that were forked meanwhile, and cannot begin either, are used up
        while not await renders(processes) or forker.num_fds() != files or zombies_of(forker):
            await asyncio.sleep(0.01)


async def renders(processes: SideProcesses) -> bool:
    try:
        return await render(processes, "y") == {"text": "y"}
    except NoJobs:
        return False


def zombies_of(forker: psutil.Process) -> list[psutil.Process]:
    return [each for each in forker.children() if is_zombie(each)]


@pytest.mark.usefixtures("unending")
async def test_a_forker_that_is_killed_is_replaced(processes: SideProcesses) -> None:
    first = processes.forker_pid
    assert first is not None
    job, left = await started(processes, FOREVER), jobs_of(processes)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(Exception, match=r"^$"):
        await job
    while any(is_alive(each) for each in left):
        await asyncio.sleep(0.01)
    assert await render(processes, "y") == {"text": "y"}
    assert processes.forker_pid != first


async def test_the_end_of_a_forker_is_an_error_of_what_runs_it() -> None:
    processes = SideProcesses(TOKENIZER.backend.to_str)
    running = asyncio.create_task(processes.run())
    await render(processes, "")
    assert processes.forker_pid is not None
    os.kill(processes.forker_pid, signal.SIGKILL)
    with pytest.raises(ForkerEnded, match="-9"):
        await running


@pytest.mark.long
async def test_a_job_does_not_wait_long_for_a_forker_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_START_S", LONG_S)  # as it would wait for one that starts

    def no_tokenizer() -> str:
        raise OSError("no tokenizer")

    processes = SideProcesses(no_tokenizer)
    running = asyncio.create_task(supervised("jobs", processes.run))
    try:
        async with asyncio.timeout(LONG_S / 2):
            for _ in range(2):
                with pytest.raises(NoJobs):
                    await render(processes, "")
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_signals_to_the_whole_group_leave_the_forker(processes: SideProcesses) -> None:
    first = processes.forker_pid
    assert first is not None
    for number in (*ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        os.kill(first, number)
        assert await render(processes, "y") == {"text": "y"}
    assert processes.forker_pid == first


def test_nothing_is_left_of_a_gateway_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        forker = psutil.Process(int(parent.stdout.readline()))
        beside = [forker, *forker.children()]
        assert len(beside) >= 3
        parent.kill()
    gone, alive = psutil.wait_procs(beside, timeout=120)
    assert not [each for each in alive if is_alive(each)], gone
