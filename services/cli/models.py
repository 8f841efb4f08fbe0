"""A model that a user names by its path or by its id on the hub: where it is on this machine, and its name."""

import sys
from pathlib import Path

from services.cli import hub
from services.config.option import Refusal
from services.protocol.model_files.gguf_file import is_gguf


def find_model(model: str, revision: str | None, *, weights: bool = True) -> tuple[Path, str]:
    """The path of a model, which is fetched from the hub where it has to be, and the model's name. Raises Refusal."""
    file = Path(model).expanduser().absolute()  # not resolved: in the hub's cache links lead to files without a name
    if is_gguf(file):
        refuse_revision(revision)
        if not file.is_file():
            raise Refusal(f"no model at {file}: there is no such file")
        return file, file.stem
    directory = Path(model).expanduser().resolve()
    if directory.is_dir() or not hub.is_id(model):
        refuse_revision(revision)
        return _checkpoint(directory), directory.name
    sys.stderr.write(f"baton: {model}: fetching what of it is not in the cache\n")
    try:
        return _checkpoint(hub.fetch(model, revision, weights=weights)), model
    except hub.HubError as error:
        raise Refusal(str(error)) from error


def refuse_revision(revision: str | None) -> None:
    """Refuses a revision of a model that is not on the hub. Raises Refusal."""
    if revision is not None:
        raise Refusal("--revision is for a model that is given by its id on the hub")


def _checkpoint(directory: Path) -> Path:
    if not directory.is_dir():
        raise Refusal(f"no model at {directory}: there is no such directory")
    if not (directory / "config.json").is_file():
        raise Refusal(f"no model at {directory}: it has no config.json")
    return directory
