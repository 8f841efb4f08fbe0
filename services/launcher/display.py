"""The output of `baton up`: progress while it loads, one line for each thing worth knowing, then the way in.

Progress and the children's lines go to stderr, the ready lines to stdout. On a terminal a spinner turns for each
child that loads; elsewhere there are plain lines only.
"""

import json
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from services.config import API_KEY_VARIABLE, HandoffMode, LogFormat, TransportName
from services.launcher.certificates import ca_file
from services.launcher.commands import admin_url, api_url, local_address
from services.process.configs import UpConfig


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
        with suppress(OSError, ValueError):  # the terminal is gone, and with it the spinners
            self._stop_spinners()

    def starting(self, name: str, what: str) -> None:
        """Shows that something began which may take a while."""
        if self._console.is_terminal:
            self._progress.start()
            self._tasks[name] = self._progress.add_task(f"{name}: {what}", total=None)
        else:
            self.say(f"{name}: {what}")

    def finished(self, name: str) -> None:
        """Shows that the thing which `starting` announced is over."""
        task = self._tasks.pop(name, None)
        if task is not None:
            self._progress.remove_task(task)
        if not self._tasks:
            self._stop_spinners()

    def loading(self, name: str, line: str) -> None:
        """Shows the last line of a child that loads, beside its spinner."""
        task = self._tasks.get(name)
        if task is not None and line.strip():
            self._progress.update(task, description=f"{name}: {line.strip()[:100]}")

    def ready(self, name: str, seconds: float) -> None:
        """Prints one line for a child that serves now."""
        self.finished(name)
        self.say(f"{name} is ready ({seconds:.1f} s)")

    def line(self, name: str, line: str) -> None:
        """Prints a child's own line, with the child's name in front; JSON lines stay as they are."""
        self._console.print(line if self._json else f"{name} | {line}")

    def died(self, name: str, how: str, restart_in_s: float) -> None:
        """Prints one line for a child's death and its restart."""
        self.say(f"{name} died ({how}); starting it again in {restart_in_s:.1f} s")

    def say(self, text: str) -> None:
        """Prints one line of the launcher's own."""
        self._console.print(f"baton: {text}")

    def _stop_spinners(self) -> None:
        """Ends the spinners, so that nothing is drawn again while nothing loads."""
        if self._progress.live.is_started:
            self._progress.stop()


def ready_lines(config: UpConfig) -> str:
    """The facts that a user needs next, one a line, with a command to paste."""
    serving = config.serving
    url = api_url(serving)
    note = f" ({config.model_note})" if config.model_note else ""
    body = {
        "model": serving.served_model_name,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 32,
    }
    rows = {
        "Baton is ready": f"{url}/v1",
        "gRPC": f"{local_address(serving.host, serving.grpc_port)} (baton.v1.Inference)",
        "admin": f"{admin_url(serving)}/metrics, /debug/ledger",
        "model": f"{serving.served_model_name}{note}",
        "workers": f"{config.num_prefill} prefill, {config.num_decode} decode",
        "handoff": _handoff(config),
        "prefix index": _prefix_index(config),
        "transport": _transport(config),
        **_tls(config),
        "keys": _keys(config),
        "try": f"{_curl(config)} {url}/v1/chat/completions {_key_header(config)}"
        f"-H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        "end it": "Ctrl-C",
    }
    return "\n".join(f"{name:<15} {text}" for name, text in rows.items())


def _tls(config: UpConfig) -> dict[str, str]:
    if config.certificates is None:
        return {}
    file = ca_file(config.certificates)
    return {"TLS": f"everywhere, by an authority of this run; clients trust it by SSL_CERT_FILE={file}"}


def _curl(config: UpConfig) -> str:
    return "curl" if config.certificates is None else f"curl --cacert {ca_file(config.certificates)}"


def _asks_for_keys(config: UpConfig) -> bool:
    return bool(config.serving.api_keys) or config.serving.keys_file is not None


def _keys(config: UpConfig) -> str:
    if not _asks_for_keys(config):
        return "none: who reaches the port may use it"
    return f"those of {config.serving.keys_file}" if config.serving.keys_file else f"those of {API_KEY_VARIABLE}"


def _key_header(config: UpConfig) -> str:
    return "-H 'Authorization: Bearer KEY' " if _asks_for_keys(config) else ""


def _prefix_index(config: UpConfig) -> str:
    url = config.process.redis_url
    if url is None:
        return "in the gateway's memory"
    parts = urlsplit(url)
    return f"redis at {parts.netloc.rpartition('@')[2] or unquote(parts.path)}"


def _transport(config: UpConfig) -> str:
    transport = config.workers.transport
    if transport is TransportName.AUTO:
        return "auto: nixl or grpc, by pair; a decode worker says at its first read which, and why"
    return transport.value


def _handoff(config: UpConfig) -> str:
    if config.num_prefill == 0:
        return "none: there is no prefill worker"
    serving = config.serving
    if serving.handoff is HandoffMode.AUTO and serving.handoff_threshold is not None:
        return f"auto, above {serving.handoff_threshold} uncached prompt tokens"
    return serving.handoff.value


def print_ready(config: UpConfig) -> None:
    """Prints the ready lines, at once even into a pipe."""
    sys.stdout.write(f"\n{ready_lines(config)}\n\n")
    sys.stdout.flush()
