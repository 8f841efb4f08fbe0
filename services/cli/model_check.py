"""`baton models check`: what a model is made of, what it takes, and what of it is refused."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.command_kinds import Command, Group
from services.cli.models import find_model
from services.config import DeviceKind, Dtype
from services.config.engine import EngineConfig
from services.config.option import Refusal
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_file import is_gguf
from services.top.figures import printable

if TYPE_CHECKING:
    from services.engine.runner.model_report import ModelReport, ModelSizes

app = typer.Typer(cls=Group, help="Looks at models before they are served.", no_args_is_help=True)

JSON_VERSION = 1  # raised where a field changes its meaning or goes; further fields may come

_NOT_FETCHED = "the weights are not fetched and were not looked at"


@app.callback()
def _models() -> None:
    pass


@app.command(name="check", cls=Command)
def _check(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face directory, a .gguf file, or an id on the hub.")
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Branch, tag or commit of a model on the hub.")
    ] = None,
    device: Annotated[
        DeviceKind, typer.Option(metavar="auto|cpu|cuda", help="Where it would run, as for `baton up`.")
    ] = DeviceKind.CPU,
    dtype: Annotated[
        Dtype, typer.Option(metavar="|".join(Dtype), help="What it would compute in, as for `baton up`.")
    ] = Dtype.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Says what a model is made of, its memory, its kernels, and what of it is refused; loads no weights."""
    from services.engine.runner.model_report import report_model

    path, name = find_model(model, revision, weights=False)
    engine = EngineConfig(model=path, device=device, dtype=dtype)
    without_weights = _lacks_weights(path) and not Path(model).expanduser().exists()
    try:
        report = report_model(engine, with_weights=not without_weights)
    except ModelError as error:
        raise Refusal(str(error)) from error
    if without_weights:
        report.notes.append(_NOT_FETCHED)
    typer.echo(as_object(name, report) if as_json else as_table(name, report))
    raise typer.Exit(1 if report.refused else 0)


def as_table(name: str, report: "ModelReport") -> str:
    """Returns a line for each fact, its name first."""
    from services.engine.runner.model_report import mib

    rows = [("model", name), ("architecture", report.architecture or "not named"), *report.parts.items()]
    if (sizes := report.sizes) is not None:
        rows += [
            ("parameters", f"{sizes.num_parameters:,}"),
            ("weights", f"{mib(sizes.weight_bytes)} in {sizes.dtype}"),
            ("KV", _kv_words(sizes)),
            ("kernels", sizes.kernels),
        ]
    rows += [("note", note) for note in report.notes]
    rows += [("refused", reason) for reason in report.refused] or [("refused", "nothing")]
    return "\n".join(f"{title:<14}{printable(text)}" for title, text in rows)


def _kv_words(sizes: "ModelSizes") -> str:
    from services.engine.runner.model_report import KV_TOKENS, mib

    if not sizes.kv_bytes:
        return "none is kept"
    words = f"{mib(sizes.kv_bytes)} for {KV_TOKENS:,} tokens"
    if sizes.kv_window is None:
        return words
    behind = mib(sizes.kv_bytes_behind) if sizes.kv_bytes_behind else "nothing"
    return f"{words}, {behind} for those behind the window of {sizes.kv_window:,}"


def as_object(name: str, report: "ModelReport") -> str:
    """Returns the same as a JSON object; null: the files do not say it."""
    sizes = report.sizes
    values = {
        "version": JSON_VERSION,
        "model": name,
        "architecture": report.architecture or None,
        "parts": report.parts,
        "max_positions": report.max_positions,
        "dtype": sizes and sizes.dtype,
        "parameters": sizes and sizes.num_parameters,
        "weight_bytes": sizes and sizes.weight_bytes,
        "kv_bytes_per_1000_tokens": sizes and sizes.kv_bytes,
        "kv_window": sizes and sizes.kv_window,
        "kv_bytes_per_1000_tokens_behind_window": sizes and sizes.kv_bytes_behind,
        "kernels": sizes and sizes.kernels,
        "notes": report.notes,
        "refused": report.refused,
    }
    return json.dumps(values, indent=2)


def _lacks_weights(path: Path) -> bool:
    return not is_gguf(path) and not any(path.glob("*.safetensors"))
