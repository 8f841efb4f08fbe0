"""The command line: what it refuses, in one line, and what it does not load."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import checks
from services.config import CPU_ISA_VARIABLE
from services.config.engine import EngineConfig, parse_fraction, parse_memory, parse_split_keys
from services.config.option import OptionError, Refusal, options_of
from services.engine.kernels.cpu import isa
from services.process.configs import parse_generation_config, parse_redis_url, parse_workers

ROOT = Path(__file__).parents[2]


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    wide = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(command, cwd=ROOT, env=wide, capture_output=True, text=True, timeout=200)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Enough of a model for the command line to take it for one."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.few(1)
@pytest.mark.parametrize("command", ["up", "prefill", "decode"])
def test_a_missing_model_is_one_line(command: str) -> None:
    result = baton(command, "--model", "/no/such/model")
    assert result.returncode == 1
    assert result.stderr == "baton: no model at /no/such/model: there is no such directory\n"


@pytest.mark.parametrize("command", ["up", "prefill", "decode"])
def test_a_class_of_processors_that_there_is_not_is_one_line(
    command: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all workers together: the process that starts them says it."""
    monkeypatch.setenv(CPU_ISA_VARIABLE, "avx3")
    result = baton(command, "--model", str(checkpoint))
    words = "there is no such class; known are auto, amx, avx512_bf16, avx512, avx2"
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"baton: BATON_CPU_ISA=avx3: {words}\n"


def test_a_class_above_the_processors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "host_features", lambda: dict.fromkeys(("avx2", "fma", "f16c", "bmi", "bmi2"), True))
    monkeypatch.setenv(CPU_ISA_VARIABLE, "avx512")
    with pytest.raises(Refusal, match=r"BATON_CPU_ISA=avx512: this processor lacks .*; its class is avx2"):
        checks.check_engine(EngineConfig(model=Path()))


def test_the_help_and_the_documents_name_every_class_of_processors() -> None:
    names = [each.name for each in isa.ISAS]
    assert f"{CPU_ISA_VARIABLE} in the environment names ({', '.join(names)})" in _help_of("kernels")
    assert ", ".join(f"`{name}`" for name in names) in (ROOT / "docs/reference.md").read_text().replace("\n", " ")


def _help_of(option: str) -> str:
    (text,) = (field.option.help for field in options_of(EngineConfig) if field.name == option)
    return text


def test_a_directory_without_a_model_is_one_line(tmp_path: Path) -> None:
    result = baton("prefill", "--model", str(tmp_path))
    assert (result.returncode, result.stderr) == (1, f"baton: no model at {tmp_path}: it has no config.json\n")


def test_what_says_one_thing_twice_or_is_for_another_device_is_refused(checkpoint: Path) -> None:
    options = ("decode", "--model", str(checkpoint), "--device", "cuda")
    result = baton(*options, "--kv-memory", "1GiB", "--gpu-memory-fraction", "0.5")
    assert result.stderr.endswith("both say how much memory KV gets: say one of both\n")
    result = baton(*options, "--kernels", "torch")
    assert result.stderr == "baton: --kernels torch is for the CPU alone: the device is a GPU\n"
    for sizes in (["--tensor-parallel-size", "2"], ["--pipeline-parallel-size", "2"]):
        result = baton("prefill", "--model", str(checkpoint), "--device", "cuda", *sizes)
        assert result.stderr == f"baton: {sizes[0]} is for the CPU so far: the device is a GPU\n"
    result = baton(*options, "--expert-parallel")
    assert result.stderr == "baton: --expert-parallel is for the CPU so far: the device is a GPU\n"


def test_stages_are_refused_where_they_would_only_be_slower(checkpoint: Path) -> None:
    options = "--model", str(checkpoint), "--pipeline-parallel-size", "2"
    refused = baton("decode", *options).stderr
    assert refused.startswith("baton: --pipeline-parallel-size 2 is for prefill workers: a decode worker would only be")
    refused = baton("up", *options).stderr
    assert (
        refused
        == "baton: --pipeline-parallel-size is for prefill workers: of `baton up`, --prefill-pp says it for these\n"
    )


def test_a_gguf_file_is_found_by_its_name(tmp_path: Path) -> None:
    missing = tmp_path / "models" / "m.gguf"
    result = baton("gateway", "--model", str(missing), "--workers", "a:1")
    assert (result.returncode, result.stderr) == (1, f"baton: no model at {missing}: there is no such file\n")
    (tmp_path / "blob").write_bytes(b"GGUF" + bytes(40))
    (tmp_path / "m.gguf").symlink_to("blob")  # as the hub's cache has it
    result = baton("gateway", "--model", str(tmp_path / "m.gguf"), "--workers", "a:1")
    assert result.returncode == 1
    assert result.stderr.endswith("m.gguf is damaged or no GGUF file: version 0, known are 2 and 3, little-endian\n")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "is a JSON object"),
        ("[1]", "is a JSON object"),
        ('{"temprature": 1}', "temprature is not known"),
        ('{"top_p": 2}', "top_p is 2, which is out of its range"),
        ('{"top_k": 1.5}', "top_k is 1.5, which is out of its range"),
    ],
)
def test_sampling_defaults_that_make_no_sense_are_refused(text: str, named: str) -> None:
    with pytest.raises(Refusal, match=named):
        parse_generation_config(text)


def test_sampling_defaults_are_read() -> None:
    values = parse_generation_config('{"temperature": 0, "top_k": 0, "min_p": null}')
    assert values == {"temperature": 0.0, "top_k": -1}


GPU_OPTIONS = [
    ("--quantization", "fp8"),
    ("--gpu-memory-fraction", "0.5"),
    ("--attention-split-keys", "512"),
]


@pytest.mark.parametrize("option", GPU_OPTIONS, ids=lambda option: option[0])
def test_options_for_gpus_are_refused_on_the_cpu(option: tuple[str, str], checkpoint: Path) -> None:
    result = baton("decode", "--model", str(checkpoint), "--device", "cpu", *option)
    refusal = f"baton: {' '.join(option)} is for GPUs alone: the device is the CPU\n"
    assert (result.returncode, result.stderr) == (1, refusal)


def test_what_is_refused_is_refused_before_a_model_is_fetched() -> None:
    result = baton("up", "--model", "org/none", "--device", "cpu", "--quantization", "fp8")
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert "--quantization fp8" in result.stderr


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("command", "host"),
    [
        ("prefill", "0.0.0.0"),
        ("prefill", "192.0.2.7"),
        ("prefill", "::"),
        ("prefill", "worker.example"),
        ("gateway --workers a:1 --allow-anonymous", "0.0.0.0"),
        ("up --allow-anonymous", "192.0.2.7"),
    ],
)
def test_plain_text_on_a_network_must_be_allowed(command: str, host: str, checkpoint: Path) -> None:
    needs = "--mtls" if command == "prefill" else "--tls-cert and --tls-key,"
    result = baton(*command.split(), "--model", str(checkpoint), "--host", host)
    assert result.returncode == 1
    refusal = f"baton: --host {host} needs {needs} or --allow-plaintext: without TLS, anyone on that network can "
    assert result.stderr.startswith(refusal)
    assert result.stderr.count("\n") == 1


def test_an_admin_port_on_a_network_has_tls_too_or_is_allowed_plain_text(checkpoint: Path) -> None:
    """Keys with the right admin travel there."""
    arguments = ["--workers", "a:1", "--model", str(checkpoint), "--allow-anonymous", "--admin-host", "192.0.2.7"]
    refused = baton("gateway", *arguments)
    assert refused.returncode == 1
    start = "baton: --admin-host 192.0.2.7 needs --tls-cert and --tls-key, or --allow-plaintext: without TLS, anyone on"
    assert refused.stderr.startswith(start)
    allowed = baton("gateway", *arguments, "--allow-plaintext").stderr.splitlines()[0]
    assert allowed.startswith("baton: plain text at --admin-host 192.0.2.7: anyone on that network can read keys")


@pytest.mark.few(1)
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_plain_text_on_a_network_is_said_at_the_start(log_format: str, checkpoint: Path) -> None:
    """In red on a terminal; as a line like all others where programs read them."""
    arguments = ["--host", "192.0.2.7", "--allow-plaintext", "--allow-anonymous", "--log-format", log_format]
    first = baton("gateway", "--workers", "a:1", "--model", str(checkpoint), *arguments).stderr.splitlines()[0]
    danger = "plain text at --host 192.0.2.7: anyone on that network can read and change prompts and answers"
    assert first == f"baton: {danger}" if log_format == "text" else json.loads(first)["event"] == danger


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--tls-cert", "c"], "--tls-cert and --tls-key belong together: name both"),
        (["--tls-key", "k"], "--tls-cert and --tls-key belong together: name both"),
        (["--tls", "--mtls", "d"], "--tls makes all certificates: leave --mtls, --tls-cert and --tls-key out"),
        (["--tls", "--tls-cert", "c", "--tls-key", "k"], "--tls makes all certificates: leave --mtls"),
        (
            ["--tls", "--redis-url", "rediss://h"],
            "--tls makes an authority that the Redis of --redis-url does not know",
        ),
    ],
)
def test_certificates_that_contradict_each_other_are_refused(
    options: list[str], refusal: str, checkpoint: Path
) -> None:
    result = baton("up", "--model", str(checkpoint), *options)
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith(f"baton: {refusal}")


@pytest.mark.long
def test_certificates_that_cannot_be_used_end_a_process_in_one_line(checkpoint: Path, tmp_path: Path) -> None:
    result = baton("prefill", "--model", str(checkpoint), "--mtls", str(tmp_path / "none"))
    assert result.returncode == 1
    assert result.stderr == f"baton prefill: {tmp_path}/none/tls.crt cannot be read: No such file or directory\n"


@pytest.mark.parametrize("option", ["--allow-plaintext", "--kv-memory", "--max-num-batched-tokens"])
def test_help_names_the_options(option: str) -> None:
    assert option in baton("prefill", "--help").stdout


def test_a_process_that_is_told_to_end_while_it_loads_ends() -> None:
    """By a handler of its own: for process 1, as in a container, there is no other end."""
    code = (
        "import time; from services.cli import commands, main; "
        "commands.app = lambda **_: (print('loading', flush=True), time.sleep(300)); main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM


def test_help_loads_neither_torch_nor_grpc() -> None:
    code = (
        "import sys\nfrom services.cli.commands import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: print([name for name in ('torch', 'grpc', 'numpy') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("512MiB", 512 << 20), ("4GiB", 4 << 30), ("1.5 kib", 1536), ("2gb", 2 * 10**9)],
)
def test_memory_is_read_in_the_units_people_write(text: str, num_bytes: int) -> None:
    assert parse_memory(text) == num_bytes


@pytest.mark.parametrize("text", ["", "4x", "-1", "GiB", "1e9"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_memory(text)


@pytest.mark.parametrize("text", ["0", "-128", "100", "many", ""])
def test_split_sizes_are_multiples_of_what_kernels_read_at_once(text: str) -> None:
    assert parse_split_keys("256") == 256
    with pytest.raises(OptionError):
        parse_split_keys(text)


@pytest.mark.parametrize(("text", "fraction"), [("0.5", 0.5), ("1", 1.0), (".01", 0.01)])
def test_a_fraction_is_above_0_and_at_most_1(text: str, fraction: float) -> None:
    assert parse_fraction(text) == fraction


@pytest.mark.parametrize("text", ["0", "-0.5", "1.01", "nan", "90%", ""])
def test_what_is_no_fraction_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_fraction(text)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:0", "host:65536", "host:x", "a:1,b"])
def test_what_is_no_list_of_workers_is_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_workers(text)


def test_workers_are_read_from_a_list() -> None:
    assert parse_workers("a:1, [::1]:2,") == ("a:1", "[::1]:2")


@pytest.mark.parametrize(
    "url",
    ["redis://localhost", "rediss://user:p%2Fw@r:6380/1", "unix:///run/redis.sock", "redis+cluster://a:7000"],
)
def test_redis_is_named_by_a_url(url: str) -> None:
    assert parse_redis_url(url) == url


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://x", "redis://:secret/w@host:6379", "redis://host:port"])
def test_what_is_no_url_of_redis_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(OptionError) as refusal:
        parse_redis_url(url)
    assert "secret" not in str(refusal.value)


def test_an_address_to_advertise_is_one() -> None:
    assert checks.advertised_host("10.0.0.1", None, "redis://r") == "10.0.0.1"
    assert checks.advertised_host("0.0.0.0", "10.0.0.2", "redis://r") == "10.0.0.2"
    assert checks.advertised_host("0.0.0.0", None, None) is None
    with pytest.raises(Refusal, match="--advertise-host"):
        checks.advertised_host("0.0.0.0", None, "redis://r")
    with pytest.raises(Refusal, match="--redis-url"):
        checks.advertised_host("127.0.0.1", "10.0.0.2", None)


def test_sigterm_ends_a_process_that_collects_garbage_in_that_moment() -> None:
    script = """
import gc, os, signal, time
from services import cli
signal.signal(signal.SIGTERM, cli._end)
gc.callbacks.append(lambda phase, info: os.kill(os.getpid(), signal.SIGTERM))
gc.collect()
time.sleep(600)
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=120)
    assert ended.returncode == 128 + signal.SIGTERM
