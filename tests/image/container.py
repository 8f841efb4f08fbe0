"""A container of an image that was built here: a process in its root, which is read-only, as its user."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.image.build import Image
from tests.image.roots import Mounts, command_in


class Container:
    """Runs commands of an image. Each of its volumes is a folder below `directory`."""

    def __init__(self, image: Image, directory: Path) -> None:
        self.image = image
        directory.mkdir()
        self._volumes = {place: directory / place.strip("/").replace("/", "-") for place in image.volumes}
        for place, folder in self._volumes.items():  # as an engine makes a volume: with what the image has there
            subprocess.run(["cp", "--archive", str(image.root / place.lstrip("/")), str(folder)], check=True)

    def output_of(self, *command: str) -> str:
        """Returns what a command prints, in the place of the entry point. Raises CalledProcessError."""
        return subprocess.run(self._wrapped(command), check=True, capture_output=True, text=True, timeout=300).stdout

    @contextlib.contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Runs the entry point with these arguments, until the context ends."""
        process = subprocess.Popen(self._wrapped([*self.image.entrypoint, *arguments]))
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            process.wait()

    def files(self, volume: str) -> list[str]:
        """Returns the files of a volume, relative to it."""
        folder = self._volumes[volume]
        return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]

    def _wrapped(self, command: Sequence[str]) -> list[str]:
        user, _, group = self.image.user.partition(":")
        privileges = [f"--reuid={user}", f"--regid={group}", "--clear-groups", "--no-new-privs", "--bounding-set=-all"]
        inside = ["setpriv", *privileges, "sh", "-c", f'cd {self.image.workdir} && exec "$@"', "sh", *command]
        mounts = Mounts(writable=self._volumes, read_only_root=True)
        return command_in(self.image.root, inside, mounts, self.image.environment)
