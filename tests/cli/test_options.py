"""Options are fields of configurations: each flag reaches its field, and the documents have them all."""

import re
from collections.abc import Iterator
from dataclasses import MISSING
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from services.cli import commands, start, watching
from services.cli.commands import app
from services.config import (
    API_KEY_VARIABLE,
    GC_DEBUG_VARIABLE,
    KEYS_VARIABLE,
    MTLS_VARIABLE,
    REDIS_URL_VARIABLE,
    DeviceKind,
    Dtype,
    HandoffMode,
    Kernels,
    KvCacheDtype,
    LoadFormat,
    LogFormat,
    Pooling,
    Quantization,
    ReasoningParser,
    ShareWeights,
    ToolParser,
    TransportName,
    WorkerRole,
)
from services.config.engine import EngineConfig
from services.config.option import OptionField, Refusal, options_of
from services.doctor.config import DoctorConfig
from services.launcher import main as launcher
from services.launcher import random_model
from services.launcher.child import Place
from services.launcher.commands import worker_config
from services.process.configs import (
    WORKER_PORTS,
    GatewayConfig,
    ModelChoice,
    ProcessSettings,
    ServingSettings,
    UpConfig,
    UpModelChoice,
    WorkerConfig,
    WorkerSettings,
)
from services.top.config import GatewayChoice, ListConfig, RequestConfig, TopConfig
from tests.e2e.conftest import write_model
from tests.gateway.keys.key_files import write_keys

ROOT = Path(__file__).parents[2]
UP = [*options_of(UpModelChoice), *options_of(UpConfig)]
ALONE = [*options_of(ModelChoice), *options_of(GatewayConfig), *options_of(WorkerConfig)]

ENGINE: dict[str, tuple[str, Any]] = {
    "--device=cpu": ("device", DeviceKind.CPU),
    "--dtype=bfloat16": ("dtype", Dtype.BFLOAT16),
    "--load-format=dummy": ("load_format", LoadFormat.DUMMY),
    "--max-model-len=100": ("max_model_len", 100),
    "--max-num-seqs=3": ("max_num_seqs", 3),
    "--max-num-batched-tokens=17": ("max_num_batched_tokens", 17),
    "--block-size=32": ("block_size", 32),
    "--kv-memory=3MiB": ("kv_memory_bytes", 3 << 20),
    "--num-threads=2": ("num_threads", 2),
    "--tensor-parallel-size=2": ("tensor_parallel_size", 2),
    "--expert-parallel": ("expert_parallel", True),
    "--kernels=torch": ("kernels", Kernels.TORCH),
    "--share-weights=off": ("share_weights", ShareWeights.OFF),
    "--quantization=int4": ("quantization", Quantization.INT4),
    "--kv-cache-dtype=int8": ("kv_cache_dtype", KvCacheDtype.INT8),
}
GPU: dict[str, tuple[str, Any]] = {
    "--device=cuda": ("device", DeviceKind.CUDA),
    "--gpu-memory-fraction=0.25": ("gpu_memory_fraction", 0.25),
    "--attention-split-keys=512": ("split_keys", 512),
}
SERVING: dict[str, tuple[str, Any]] = {
    "--served-model-name=name": ("served_model_name", "name"),
    "--model-alias=claude-*=name,gpt-*=name": ("model_aliases", ("claude-*=name", "gpt-*=name")),
    "--host=0.0.0.0": ("host", "0.0.0.0"),
    "--port=81": ("port", 81),
    "--grpc-port=82": ("grpc_port", 82),
    "--tls-cert=c.crt": ("tls_cert", Path("c.crt")),
    "--tls-key=c.key": ("tls_key", Path("c.key")),
    "--allow-plaintext": ("allow_plaintext", True),
    "--api-key=a,b": ("api_keys", ("a", "b")),
    "--allow-anonymous": ("allow_anonymous", True),
    "--console-text": ("console_text", True),
    "--admin-host=127.0.0.2": ("admin_host", "127.0.0.2"),
    "--admin-port=83": ("admin_port", 83),
    "--handoff=never": ("handoff", HandoffMode.NEVER),
    "--handoff-threshold=7": ("handoff_threshold", 7),
    '--override-generation-config={"temperature": 0.25}': ("generation_overrides", {"temperature": 0.25}),
    "--request-timeout=2.5": ("request_timeout_s", 2.5),
    "--response-lifetime=60": ("response_lifetime_s", 60.0),
    "--no-worker-wait=0.5": ("no_worker_wait_s", 0.5),
    "--ttft-slo=1.5": ("ttft_slo_s", 1.5),
    "--strict-fields": ("strict_fields", True),
    "--clamp-max-tokens": ("clamp_max_tokens", True),
    "--enable-force-include-usage": ("enable_force_include_usage", True),
    "--return-tokens-as-token-ids": ("return_tokens_as_token_ids", True),
    "--max-logprobs=-1": ("max_logprobs", -1),
    "--enable-tokenizer-info-endpoint": ("enable_tokenizer_info_endpoint", True),
    "--chat-template=chat.jinja": ("chat_template", "chat.jinja"),
    "--trust-request-chat-template": ("trust_request_chat_template", True),
    "--tool-parser=hermes": ("tool_parser", ToolParser.HERMES),
    "--reasoning-parser=none": ("reasoning_parser", ReasoningParser.NONE),
    "--pooling=mean": ("pooling", Pooling.MEAN),
    "--root-path=/models/chat/": ("root_path", "/models/chat"),
    "--allow-origin=https://a,*": ("allowed_origins", ("https://a", "*")),
}
PROCESS: dict[str, tuple[str, Any]] = {
    "--redis-url=redis://r": ("redis_url", "redis://r"),
    "--mtls=certificates": ("mtls", Path("certificates")),
    "--drain-timeout=7": ("drain_timeout_s", 7.0),
    "--log-format=json": ("log_format", LogFormat.JSON),
}

DOCTOR: dict[str, tuple[str, Any]] = {
    "--redis-url=redis://r": ("redis_url", "redis://r"),
    "--workers=a:1,b:2": ("worker_addresses", ("a:1", "b:2")),
    "--gateway=http://g:9001": ("gateway_url", "http://g:9001"),
    "--api-key=a-key": ("api_keys", ("a-key",)),
    "--mtls=certificates": ("mtls", Path("certificates")),
    "--tls-cert=c.crt": ("tls_cert", Path("c.crt")),
    "--tls-key=c.key": ("tls_key", Path("c.key")),
    "--keys=keys.json": ("keys_file", Path("keys.json")),
    "--measure": ("measure", True),
    "--kubernetes=chat": ("namespace", "chat"),
    "--strict": ("strict", True),
    "--json": ("as_json", True),
}

GATEWAY: dict[str, tuple[str, Any]] = {
    "--gateway=https://g:9001": ("url", "https://g:9001"),
    "--api-key=a-key": ("api_keys", ("a-key",)),
    "--ca=ca.crt": ("ca", Path("ca.crt")),
}


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations that processes would run with."""
    found: list[Any] = []

    def run(config: Any) -> int:
        found.append(config)
        return 0

    def run_with_argument(config: Any, _: Any = None) -> int:
        return run(config)

    for name in ("show_fleet", "list_fleet", "show_request"):
        monkeypatch.setattr(watching, name, run_with_argument)
    for module, name in ((start, "run_gateway"), (start, "run_worker"), (launcher, "run"), (commands, "diagnose")):
        monkeypatch.setattr(module, name, run)
    for variable in (REDIS_URL_VARIABLE, API_KEY_VARIABLE, KEYS_VARIABLE, MTLS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    return found


@pytest.fixture
def model() -> Path:
    return random_model.made()


def baton(*arguments: str) -> None:
    typer.main.get_command(app).main(list(arguments), prog_name="baton", standalone_mode=False)


@pytest.mark.parametrize("engine", [ENGINE, GPU], ids=["cpu", "gpu"])
def test_every_flag_of_a_worker_reaches_its_field(engine: dict[str, Any], model: Path, configs: list[Any]) -> None:
    flags = ["--host=10.0.0.1", "--port=9", "--allow-plaintext", "--advertise-host=10.0.0.2", "--transport=nixl"]
    flags.append("--health-port=10")
    baton("decode", f"--model={model}", *flags, *engine, *PROCESS)
    assert configs == [
        WorkerConfig(
            role=WorkerRole.DECODE,
            host="10.0.0.1",
            port=9,
            allow_plaintext=True,
            health_port=10,
            advertised_host="10.0.0.2",
            workers=WorkerSettings(
                engine=EngineConfig(model=model, **dict(engine.values())), transport=TransportName.NIXL
            ),
            process=ProcessSettings(**dict(PROCESS.values())),
        )
    ]


def test_every_flag_of_a_gateway_reaches_its_field(model: Path, configs: list[Any]) -> None:
    flags = [f"--model={model}", "--max-waiting=8", *SERVING]
    baton("gateway", *flags, *PROCESS)
    baton("gateway", *flags, "--workers=a:1,b:2")
    serving = ServingSettings(**dict(SERVING.values()))
    assert configs == [
        GatewayConfig(model=model, max_waiting=8, serving=serving, process=ProcessSettings(**dict(PROCESS.values()))),
        GatewayConfig(model=model, max_waiting=8, serving=serving, worker_addresses=("a:1", "b:2")),
    ]


def test_every_flag_of_up_reaches_its_field(model: Path, configs: list[Any]) -> None:
    engine = {flag: field for flag, field in ENGINE.items() if flag != "--expert-parallel"}  # the model has no experts
    baton(
        "up",
        f"--model={model}",
        "--prefill=0",
        "--decode=2",
        "--start-timeout=60",
        "--prefill-tp=4",
        "--decode-tp=1",
        "--prefill-pp=2",
        "--transport=grpc",
        *SERVING,
        *engine,
        *PROCESS,
    )
    assert configs == [
        UpConfig(
            serving=ServingSettings(**dict(SERVING.values())),
            num_prefill=0,
            num_decode=2,
            start_timeout_s=60.0,
            prefill_tp=4,
            decode_tp=1,
            prefill_pp=2,
            max_positions=8192,
            workers=WorkerSettings(
                engine=EngineConfig(model=model, **dict(engine.values())), transport=TransportName.GRPC
            ),
            process=ProcessSettings(**dict(PROCESS.values())),
        )
    ]


def test_experts_are_divided_among_the_ranks_of_those_workers_that_have_several(
    configs: list[Any], tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model", "mixtral", num_local_experts=3)
    arguments = "up", f"--model={directory}", "--kv-memory=1MiB", "--expert-parallel"
    baton(*arguments, "--prefill-tp=2")
    (config,) = configs
    assert [config.expert_parallel(role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)] == [True, False]
    places = Place(WorkerRole.PREFILL, 0, 0), Place(WorkerRole.DECODE, 0, 1)
    of_workers = [worker_config(config, place, 9100).workers.engine for place in places]
    assert [engine.expert_parallel for engine in of_workers] == [True, False]
    with pytest.raises(Refusal, match="say how many with --tensor-parallel-size, --prefill-tp or --decode-tp"):
        baton(*arguments)
    with pytest.raises(Refusal, match="4 ranks cannot share 3 experts"):
        baton(*arguments, "--decode-tp=4")


def test_every_flag_of_doctor_reaches_its_field(configs: list[Any]) -> None:
    baton("doctor")
    baton("doctor", *DOCTOR)
    assert {flag.partition("=")[0] for flag in DOCTOR} == {field.flag for field in options_of(DoctorConfig)}
    assert configs == [DoctorConfig(), DoctorConfig(**dict(DOCTOR.values()))]
    assert "a-key" not in repr(configs)


def test_every_flag_of_what_watches_reaches_its_field(configs: list[Any]) -> None:
    gateway = GatewayChoice(**dict(GATEWAY.values()))
    baton("top", *GATEWAY, "--mtls=certificates")
    baton("ls", *GATEWAY, "--limit=7", "--json")
    baton("requests", *GATEWAY, "--json", "an-id")
    baton("top")
    assert configs == [
        TopConfig(gateway=gateway, mtls=Path("certificates")),
        ListConfig(gateway=gateway, limit=7, as_json=True),
        RequestConfig(gateway=gateway, as_json=True),
        TopConfig(),
    ]
    assert "a-key" not in repr(configs)


def test_up_makes_certificates_where_it_is_told_to(model: Path, configs: list[Any]) -> None:
    baton("up", f"--model={model}", "--tls", "--host=0.0.0.0", "--allow-anonymous")
    assert [config.tls for config in configs] == [True]


def test_these_are_all_flags() -> None:
    tried = {flag.partition("=")[0] for flag in (*ENGINE, *GPU, *SERVING, *PROCESS)}
    tried |= {"--model", "--transport", "--prefill", "--decode", "--max-waiting", "--workers"}
    tried |= {"--tls", "--advertise-host", "--health-port", "--keys", "--start-timeout", "--prefill-tp", "--decode-tp"}
    tried |= {"--prefill-pp", "--pipeline-parallel-size"}
    tried |= {"--rank", "--world-size", "--group"}  # tests/cli/test_group_options.py
    assert {field.flag for field in (*UP, *ALONE)} - tried == {"--revision"}  # for the hub: tests/test_hub.py


def test_options_that_are_not_given_have_their_defaults(model: Path, configs: list[Any]) -> None:
    baton("up", f"--model={model}")
    baton("prefill", f"--model={model}")
    baton("decode", f"--model={model}")
    workers = WorkerSettings(engine=EngineConfig(model=model))
    assert configs == [
        UpConfig(serving=ServingSettings(served_model_name=model.name), max_positions=8192, workers=workers),
        WorkerConfig(role=WorkerRole.PREFILL, port=9100, workers=workers),
        WorkerConfig(role=WorkerRole.DECODE, port=9200, workers=workers),
    ]


def test_the_environment_has_the_directory_of_certificates(
    model: Path, configs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MTLS_VARIABLE, "there")
    baton("prefill", f"--model={model}", "--host=10.0.0.1")
    baton("gateway", f"--model={model}", "--workers=a:1", "--mtls=here")
    assert [config.process.mtls for config in configs] == [Path("there"), Path("here")]


def test_the_environment_has_the_url_of_redis_and_what_is_logged_of_collections(
    model: Path, configs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REDIS_URL_VARIABLE, "redis://elsewhere")
    monkeypatch.setenv(GC_DEBUG_VARIABLE, "top=3")
    baton("prefill", f"--model={model}")
    baton("gateway", f"--model={model}")
    baton("gateway", f"--model={model}", "--workers=a:1")
    baton("up", f"--model={model}", "--redis-url=redis://here")
    urls = ["redis://elsewhere", "redis://elsewhere", None, "redis://here"]
    assert [(config.process.redis_url, config.process.logged_gc_types) for config in configs] == [
        (url, 3) for url in urls
    ]


def test_the_environment_has_keys_and_the_file_of_keys(
    model: Path, tmp_path: Path, configs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_keys(tmp_path / "keys.json").path
    monkeypatch.setenv(API_KEY_VARIABLE, "one,two")
    monkeypatch.setenv(KEYS_VARIABLE, str(file))
    elsewhere = ("--host=0.0.0.0", "--allow-plaintext")
    baton("gateway", f"--model={model}", "--workers=a:1", *elsewhere)
    baton("up", f"--model={model}", "--api-key=three", f"--keys={file}", *elsewhere)
    found = [(config.serving.api_keys, config.serving.keys_file) for config in configs]
    assert found == [(("one", "two"), file), (("three",), file)]
    assert "two" not in repr(configs)


def test_names_of_fields_are_one_configuration_s_own() -> None:
    """A command has its values by the name of the field, wherever in the configuration the field is."""
    for fields in (UP, [*options_of(ModelChoice), *options_of(GatewayConfig)], options_of(WorkerConfig)):
        assert len({field.name for field in fields}) == len({field.flag for field in fields}) == len(fields)


def rows(text: str) -> Iterator[tuple[list[str], str]]:
    """Of each row of a table of options, the flags with their choices, and the defaults."""
    for line in text.splitlines():
        if line.startswith("| `--"):
            flags, default, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
            yield re.findall(r"`([^`]*)`", flags), default


def described(text: str) -> dict[str, tuple[set[str], str]]:
    """By flag: its choices, if any, and its default. Flags that share a row have their defaults in the same order."""
    found: dict[str, tuple[set[str], str]] = {}
    for named, default in rows(text):
        flags = list(dict.fromkeys(name.split()[0] for name in named))
        defaults = default.split(", ") if len(flags) > 1 else [default]
        for flag, own in zip(flags, defaults, strict=True):
            choices = {name.split()[1] for name in named if name.split()[0] == flag and "|" in name}
            found[flag] = ({choice for each in choices for choice in each.split("\\|")}, own)
    return found


def check(table: dict[str, tuple[set[str], str]], fields: list[OptionField]) -> None:
    assert sorted(table) == sorted(field.flag for field in fields)
    for field in fields:
        choices, default = table[field.flag]
        kind = (get_args(field.type) or (field.type,))[0]  # of what may be None, too
        is_choice = isinstance(kind, type) and issubclass(kind, StrEnum)
        assert choices == (set(kind) if is_choice else set()), field.flag
        assert default, field.flag
        if field.default not in (None, (), MISSING):  # else words say what is chosen
            said = "no" if field.default is False else str(field.default).removesuffix(".0")
            assert default.partition(": ")[0] == said, field.flag


def section(title: str) -> str:
    text = "".join((ROOT / "docs" / page).read_text() for page in ("reference.md", "run/several-machines.md"))
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_tables_of_the_reference_have_every_option_of_up_with_its_default() -> None:
    for_all, for_gpus = section("Options").split("These are for GPUs alone")
    gpu = [field for field in UP if field.flag in {flag.partition("=")[0] for flag in GPU} - {"--device"}]
    check(described(for_gpus), gpu)
    check(described(for_all), [field for field in UP if field not in gpu])


def test_the_table_of_services_alone_has_every_further_option_with_its_default() -> None:
    known = {field.flag for field in UP}
    table = described(section("Each service alone"))
    ports = table.pop("--port")[1]
    assert ports == ", ".join(f"{role}: {port}" for role, port in WORKER_PORTS.items())
    check(table, [field for field in ALONE if field.flag not in known])


def test_the_table_of_doctor_has_every_option_of_its_own_with_its_default() -> None:
    check(described(section("Doctor")), options_of(DoctorConfig))


def test_the_table_of_what_watches_has_every_option_of_its_own_with_its_default() -> None:
    fields = {field.flag: field for kind in (TopConfig, ListConfig, RequestConfig) for field in options_of(kind)}
    check(described(section("Watching")), list(fields.values()))


def test_names_and_their_aliases(model: Path, configs: list[Any]) -> None:
    aliases = ["--model-alias=claude-*=b", "--model-alias", "gpt-*=a, o?=a"]
    baton("gateway", f"--model={model}", "--workers=a:1", "--served-model-name=a, b", *aliases)
    baton("gateway", f"--model={model}", "--workers=a:1", f"--model-alias=*={model.name}")
    assert [config.serving.served_model_name for config in configs] == ["a,b", model.name]
    assert configs[0].serving.model_aliases == ("claude-*=b", "gpt-*=a", "o?=a")
    for odd in ("claude-*", "=a", "x="):
        with pytest.raises(typer.BadParameter, match="PATTERN=NAME"):
            baton("gateway", f"--model={model}", "--workers=a:1", "--served-model-name=a", f"--model-alias={odd}")
    for odd in ("a,,b", "a,a", ","):
        with pytest.raises(typer.BadParameter, match="empty name, or one name twice"):
            baton("gateway", f"--model={model}", "--workers=a:1", f"--served-model-name={odd}")
    with pytest.raises(Refusal, match="claude-\\*=b: b is none of the served names"):
        baton("gateway", f"--model={model}", "--workers=a:1", "--served-model-name=a", "--model-alias=claude-*=b")


def test_harmony_is_the_form_of_calls_and_reasoning_together(model: Path, configs: list[Any]) -> None:
    gateway = ["gateway", f"--model={model}", "--workers=a:1"]
    baton(*gateway, "--tool-parser=harmony", "--reasoning-parser=none")
    baton(*gateway, "--tool-parser=hermes", "--reasoning-parser=think")
    for named in (["--tool-parser=harmony", "--reasoning-parser=think"], ["--tool-parser=pythonic"]):
        with pytest.raises(Refusal, match="harmony goes with auto and none alone"):
            baton(*gateway, "--reasoning-parser=harmony", *named)
