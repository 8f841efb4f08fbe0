"""The commands of `baton`: options in, one frozen configuration out, and the process that it is for."""

import os
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from services.cli import checks, start, tls_checks, watching
from services.cli.bench import app as bench_app
from services.cli.command_kinds import Command, Group
from services.cli.doctor import diagnose
from services.cli.keys import app as keys_app
from services.cli.model_check import app as models_app
from services.cli.models import find_model, refuse_revision
from services.cli.options import Values, add_command, argument
from services.config import MTLS_VARIABLE, REDIS_URL_VARIABLE, LoadFormat, WorkerRole
from services.config.engine import EngineConfig
from services.config.option import Refusal, build
from services.doctor.config import DoctorConfig
from services.process.configs import (
    WORKER_PORTS,
    GatewayConfig,
    ModelChoice,
    ProcessSettings,
    ServingSettings,
    UpConfig,
    UpModelChoice,
    WorkerConfig,
)
from services.top.config import ListConfig, RequestConfig, TopConfig

app = typer.Typer(
    name="baton",
    cls=Group,
    help="Serves large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"baton {version('baton-serve')}")
        raise typer.Exit()


@app.callback()
def _baton(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def _up(values: Values) -> int:
    from services.launcher import demo_model
    from services.launcher.main import run

    _check_serving(values)
    _check_up(values)
    if "model" in values:
        path, name = _find_engine_model(values)
        demo = None
    else:
        refuse_revision(values.get("revision"))
        demo = demo_model.find()
        path, name = demo.path, demo_model.NAME
        checks.check_engine(build(EngineConfig, values | {"model": path}))
        values["generation_overrides"] = {**demo.sampling, **values["generation_overrides"]}
        values |= {"makes_model": demo.is_random, "model_note": demo.note}
    values |= {"model": path, "served_model_name": _served_names(values, name)}
    if demo is None or not demo.is_random:
        values |= _facts(values)
    return run(build(UpConfig, values))


def _facts(values: Values) -> Values:
    """Facts about the model for the banner of `baton up`; says in a line what the model takes. Raises Refusal where
    this machine cannot serve it.
    """
    engine, num_prefill = build(EngineConfig, values), values["num_prefill"]
    num_decode = values["num_decode"] if checks.generates(values["model"]) else 0
    if not num_prefill + num_decode:
        raise Refusal("--prefill 0: this model makes embeddings alone, which prefill workers do")
    of_prefill, of_decode = (values.get(name) or engine.tensor_parallel_size for name in ("prefill_tp", "decode_tp"))
    for ranks, stages in {(of_prefill, values["prefill_pp"]), (of_decode, 1)}:
        experts = engine.expert_parallel and ranks > 1
        sized = replace(engine, tensor_parallel_size=ranks, pipeline_parallel_size=stages, expert_parallel=experts)
        facts = checks.check_model(sized, num_prefill + num_decode)
    sys.stderr.write(f"baton: {checks.summarize_model(engine)}\n")
    has_template = facts.has_chat_template or values.get("chat_template") is not None
    own = {} if facts.generates else {"generates": False, "num_decode": 0}
    return {"chats": has_template, "max_positions": facts.max_positions, **own}


def _check_up(values: Values) -> None:
    """Raises Refusal before a model is looked for."""
    config = build(UpConfig, values | {"model": Path(), "served_model_name": ""})
    if config.workers.engine.pipeline_parallel_size > 1:
        raise Refusal(f"{checks.STAGES} is for prefill workers: of `baton up`, --prefill-pp says it for these")
    checks.check_expert_parallel(config)
    tls_checks.check_own_tls(config)
    tls_checks.check_serving(config.serving, config.process, makes_tls=config.tls)


def _gateway(values: Values) -> int:
    if "worker_addresses" in values and values.get("redis_url") == os.environ.get(REDIS_URL_VARIABLE):
        values.pop("redis_url", None)  # what the command line says holds, and not what the environment says
    if ("worker_addresses" in values) == ("redis_url" in values):
        raise Refusal("a gateway finds its workers through --redis-url, or is given them by --workers: say one of both")
    _check_serving(values)
    named = values | {"model": Path(), "served_model_name": ""}
    tls_checks.check_serving(build(ServingSettings, named), build(ProcessSettings, named))
    path, name = find_model(values["model"], values.get("revision"), weights=False)
    return start.run_gateway(
        build(GatewayConfig, values | {"model": path, "served_model_name": _served_names(values, name)})
    )


def _served_names(values: Values, name: str) -> str:
    """The names that clients know the model by. name: where none are given. Raises Refusal."""
    names = values.get("served_model_name") or name.replace(",", "-")  # a comma is between names
    checks.check_model_aliases(names, values["model_aliases"])
    return names


def _check_serving(values: Values) -> None:
    hosts = values["host"], values["admin_host"]
    checks.check_parsers(values["tool_parser"], values["reasoning_parser"])
    checks.check_keys(hosts, values["api_keys"], values.get("keys_file"), values["allow_anonymous"])


def _worker(values: Values) -> int:
    config = build(WorkerConfig, values | {"model": Path()})
    tls_checks.check_worker(config)
    tls_checks.check_group(config)
    checks.check_hosts(config.hosts, config.workers.engine)
    values |= {"tensor_parallel_size": config.hosts.world_size or values["tensor_parallel_size"]}
    if config.hosts.is_led:
        return _rank(values)
    host = checks.advertised_host(values["host"], values.get("advertised_host"), values.get("redis_url"))
    checks.check_stages(values["role"], values["pipeline_parallel_size"])
    path, _ = _find_engine_model(values)
    return start.run_worker(build(WorkerConfig, values | {"model": path, "advertised_host": host}))


def _rank(values: Values) -> int:
    """Runs a rank above 0 of a worker of several hosts."""
    if values.get("redis_url") == os.environ.get(REDIS_URL_VARIABLE):
        values.pop("redis_url", None)  # the environment of all workers has it
    if "redis_url" in values:
        raise Refusal("--redis-url is for rank 0, which is the worker to everybody else: leave it out here")
    if "advertised_host" not in values and values["host"] in ("0.0.0.0", "::"):
        raise Refusal(f"--host {values['host']} is no address to go to: name one with --advertise-host")
    config = build(WorkerConfig, values | {"model": Path()})
    checks.check_reach(config.hosts, config.role, config.advertised_host or config.host)
    path, _ = _find_engine_model(values)
    return start.run_worker(build(WorkerConfig, values | {"model": path}))


def _find_engine_model(values: Values) -> tuple[Path, str]:
    """The path and the name of a model for an engine. An engine that cannot be is refused before a model is fetched."""
    engine = build(EngineConfig, values | {"model": Path(values["model"])})
    checks.check_engine(engine)
    weights = engine.load_format is not LoadFormat.DUMMY
    return find_model(values["model"], values.get("revision"), weights=weights)


def _add_worker(role: WorkerRole, purpose: str) -> None:
    """Adds the command that starts a worker of this role."""
    run = lambda values: _worker(values | {"role": role})
    add_command(app, role.value, run, ModelChoice, WorkerConfig, purpose=purpose, port=WORKER_PORTS[role])


add_command(
    app,
    "up",
    _up,
    UpModelChoice,
    UpConfig,
    purpose="Starts prefill and decode workers and a gateway on this machine. Ctrl-C ends them all.",
    served_model_name=None,
)
add_command(
    app,
    "gateway",
    _gateway,
    ModelChoice,
    GatewayConfig,
    purpose="Starts a gateway: the OpenAI API over HTTP, in front of workers that it finds in Redis or is told of.",
    served_model_name=None,
)
_add_worker(WorkerRole.PREFILL, "Starts a prefill worker: it reads prompts, and hands their KV to decode workers.")
_add_worker(WorkerRole.DECODE, "Starts a decode worker: it takes KV over from prefill workers and generates tokens.")


@app.command(name="drain", cls=Command)
def _drain(
    worker: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The worker's address.")],
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="How long the whole may take. Default: the worker's --drain-timeout, for which this waits up to 24 h.",
        ),
    ] = None,
    mtls: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar=MTLS_VARIABLE,
            help="Directory with tls.crt, tls.key and ca.crt of an operator, for a worker that has --mtls.",
        ),
    ] = None,
) -> None:
    """Drains a worker: it takes no new work, finishes or moves what it has, and ends. Returns when it has ended."""
    from services.cli.drain import drain

    raise typer.Exit(drain(worker, timeout, mtls))


app.add_typer(keys_app, name="keys")
app.add_typer(bench_app, name="bench")
app.add_typer(models_app, name="models")


_UpPort = Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="The port of that `baton up` for HTTP.")]
_UpHost = Annotated[
    str | None,
    typer.Option(metavar="HOST", help="Its --host, where several serve at this port of different addresses."),
]


@app.command(name="restart", cls=Command)
def _restart(port: _UpPort = 8000, host: _UpHost = None) -> None:
    """Tells a running `baton up` to replace its workers and its gateway, one by one, while it serves."""
    from services.cli.running import restart

    raise typer.Exit(restart(host, port))


@app.command(name="scale", cls=Command)
def _scale(
    numbers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ROLE=N",
            help="prefill=N, decode=N or both: how many workers of the role there are to be. One decode worker stays "
            "at least; with prefill=0 decode workers do it all. Without any, it says which workers there are.",
        ),
    ] = None,
    port: _UpPort = 8000,
    host: _UpHost = None,
) -> None:
    """Tells a running `baton up` to start further workers, or to drain and end some, while it serves."""
    from services.cli.running import scale

    raise typer.Exit(scale(numbers or [], host, port))


add_command(
    app,
    "doctor",
    lambda values: diagnose(build(DoctorConfig, values)),
    DoctorConfig,
    purpose="Looks at this machine, and at the Redis, workers, gateway, cluster and files that it is told of.",
)

add_command(
    app,
    "top",
    lambda values: watching.show_fleet(build(TopConfig, values)),
    TopConfig,
    purpose="Shows workers, links and requests as they change. Keys sort and filter them, open a request, drain a "
    "worker; those of a `baton up` on this machine are restarted and scaled too.",
)
add_command(
    app,
    "ls",
    lambda values: watching.list_fleet(build(ListConfig, values), values.get("kinds", ())),
    ListConfig,
    purpose="Prints workers, links and the last requests as tables.",
    argument=argument("kinds", list[str] | None, None, "WHAT", "workers, links or requests. Without any, all of them."),
)
add_command(
    app,
    "requests",
    lambda values: watching.show_request(build(RequestConfig, values), values["request_id"]),
    RequestConfig,
    purpose="Prints where the time of one request went, its attempts, and which workers could have had it.",
    argument=argument("request_id", str, ..., "ID", "The request's id, as its answer has it in X-Request-Id."),
)
