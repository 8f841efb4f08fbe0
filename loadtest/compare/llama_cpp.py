"""llama.cpp's own server with parallel slots, set up as fast as we could make it.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B BUILD -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_CURL=OFF
    cmake --build BUILD --target llama-server llama-quantize -j

BUILD/bin/llama-server is for --llama-server; llama-quantize beside it makes the Q4_1 weights of a checkpoint. A GGUF
file is served as it is. The Python server of that package takes one request at a time, so it is no peer.

Measured on two cores (loadtest/results/llama-cpp.md): cells of its own for each slot halve the
time of a step with 64 requests, against cells that all slots share. Flash attention is faster than none, and keys and
values are fastest in float16, llama.cpp's own. The cache of prompts beside the slots (`--cache-ram`) only costs here:
each new prompt of a slot waits until the last one is saved. Prompts stay cached in their slots, which is what a second
run with the same prompts finds. Batch limits, samplers and OpenMP are llama.cpp's own, of which no other was faster.
"""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.compare.gguf_checkpoint import CheckpointError, write_gguf
from loadtest.compare.model_files import is_gguf
from loadtest.compare.servers import MODEL_NAME, Launch
from loadtest.compare.workloads import LONGEST
from loadtest.http_stream import Address
from loadtest.processes import Process

SLOTS = 64
_CELLS = 256  # llama.cpp rounds a slot's context up to a multiple of it
_LAST_CHARACTERS = 300
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Weights:
    """GGUF files of one model, of which there is one at least.

    own: the file that Baton serves too; bf16, q4_1: written from a checkpoint of a directory, q4_1 where there is
    llama-quantize.
    """

    own: Path | None = None
    bf16: Path | None = None
    q4_1: Path | None = None


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """One server. weights: a GGUF file; kind: the weights in a word, for the server's name."""

    program: Path
    weights: Path
    kind: str
    num_ports: int = 1

    @property
    def name(self) -> str:
        """See `Server.name`."""
        return f"llama-{self.kind}"

    @property
    def setting(self) -> str:
        """See `Server.setting`."""
        return f"llama-server with {self.weights.name}, {' '.join(_settings())}"

    def launch(self, ports: Sequence[int]) -> Launch:
        """See `Server.launch`."""
        (port,) = ports
        model = ("--model", str(self.weights), "--alias", MODEL_NAME)
        command = (str(self.program), *model, "--host", _LOOPBACK, "--port", str(port), *_settings())
        address = Address(_LOOPBACK, port)
        return Launch((Process(self.name, command),), address, ((address, "/health"),))


def weights_of(program: Path, model: Path, folder: Path) -> Weights:
    """Returns a GGUF file as it is; writes a checkpoint's directory in BF16, and in Q4_1 where llama-quantize is.

    program: llama-server, beside which llama-quantize is looked for. Raises CheckpointError and OSError.
    """
    if is_gguf(model):
        return Weights(own=model)
    bf16, q4_1 = folder / "bf16.gguf", folder / "q4_1.gguf"
    write_gguf(model, bf16)
    quantize = program.with_name("llama-quantize")
    if not quantize.is_file():
        return Weights(bf16=bf16)
    made = subprocess.run([quantize, bf16, q4_1, "Q4_1"], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise CheckpointError(f"{quantize} ended with {made.returncode}: {made.stderr.strip()[-_LAST_CHARACTERS:]}")
    return Weights(bf16=bf16, q4_1=q4_1)


def version(program: Path) -> str:
    """Asks the program for its version, on one line. Raises OSError and CalledProcessError."""
    asked = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return ", ".join((asked.stdout + asked.stderr).split("\n")).strip(", ")


def _settings() -> tuple[str, ...]:
    """Makes the options that the fastest server has: one slot for each request, each with cells of its own."""
    per_slot = -(-LONGEST // _CELLS) * _CELLS
    options = {
        "--threads": str(len(os.sched_getaffinity(0))),
        "--parallel": str(SLOTS),
        "--ctx-size": str(SLOTS * per_slot),
        "--flash-attn": "on",
        "--cache-ram": "0",
    }
    return (*(text for option in options.items() for text in option), "--no-kv-unified")
