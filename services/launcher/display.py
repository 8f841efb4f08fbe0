"""What a person sees of `baton up`: progress while it loads, one line for each thing worth knowing, then the way in.

Progress and the children's lines go to stderr, the ready lines to stdout. On a terminal a spinner turns for each
child that loads; elsewhere there are plain lines only.
"""

import json
import sys
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from services.config import HandoffMode, LogFormat, TransportName, UpConfig
from services.launcher.commands import local_url


class Display:
    """Listens to supervisors and prints. Used as a context; leaving it takes the spinners away."""

    def __init__(self, log_format: LogFormat) -> None:
        self._json = log_format is LogFormat.JSON
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_spinners()

    def starting(self, name: str, what: str) -> None:
        """Something began that may take a while."""
        if self._console.is_terminal:
            self._progress.start()
            self._tasks[name] = self._progress.add_task(f"{name}: {what}", total=None)
        else:
            self.say(f"{name}: {what}")

    def finished(self, name: str) -> None:
        """What `starting` announced is over."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)
        if not self._tasks:
            self._stop_spinners()

    def loading(self, name: str, line: str) -> None:
        """The last line of a child that loads, beside its spinner."""
        task = self._tasks.get(name)
        if task is not None and line.strip():
            self._progress.update(task, description=f"{name}: {line.strip()[:100]}")

    def ready(self, name: str, seconds: float) -> None:
        """One line for a child that serves now."""
        self.finished(name)
        self.say(f"{name} is ready ({seconds:.1f} s)")

    def line(self, name: str, line: str) -> None:
        """A child's own line, with its name in front; JSON lines stay what they are."""
        self._console.print(line if self._json else f"{name} | {line}")

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        """One line for a death and what comes next."""
        self.say(f"{name} died ({how}); starting it again in {restart_in_s:.1f} s")

    def say(self, text: str) -> None:
        """One line of the launcher's own."""
        self._console.print(f"baton: {text}")

    def _stop_spinners(self) -> None:
        """Nothing redraws while nothing turns."""
        if self._progress.live.is_started:
            self._progress.stop()


def ready_lines(config: UpConfig) -> str:
    """Where to go from here, one fact a line, with a command to paste."""
    url = local_url(config.host, config.port)
    note = f" ({config.model_note})" if config.model_note else ""
    body = {
        "model": config.served_model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
    }
    rows = {
        "Baton is ready": f"{url}/v1",
        "gRPC": f"{local_url(config.host, config.grpc_port).removeprefix('http://')} (baton.v1.Inference)",
        "model": f"{config.served_model_name}{note}",
        "workers": f"{config.num_prefill} prefill, {config.num_decode} decode",
        "handoff": _handoff(config),
        "prefix index": _prefix_index(config),
        "transport": _transport(config),
        "try": f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        "end it": "Ctrl-C",
    }
    return "\n".join(f"{name:<15} {text}" for name, text in rows.items())


def _prefix_index(config: UpConfig) -> str:
    if config.redis_url is None:
        return "in the gateway's memory"
    return f"redis at {urlsplit(config.redis_url).netloc.rpartition('@')[2] or 'a socket'}"


def _transport(config: UpConfig) -> str:
    if config.transport is TransportName.AUTO:
        return "auto: nixl or grpc, by pair; a decode worker says at its first read which, and why"
    return config.transport.value


def _handoff(config: UpConfig) -> str:
    if config.num_prefill == 0:
        return "none: there is no prefill worker"
    if config.handoff is HandoffMode.AUTO and config.handoff_threshold is not None:
        return f"auto, above {config.handoff_threshold} uncached prompt tokens"
    return config.handoff.value


def print_ready(config: UpConfig) -> None:
    """The ready lines, at once even into a pipe."""
    sys.stdout.write(f"\n{ready_lines(config)}\n\n")
    sys.stdout.flush()
