"""The parts of a forward pass as a worker runs it, each over all layers and by itself, without the step loop.

The limit of a part is the longer of two: the bytes that it has to read at the rate at which this machine copies memory,
and its operations at the rate at which its cores multiply and add in registers. Both rates are measured first, the
latter by the instructions of the class of processors that the kernels are made for. The share is the limit over what
the part took.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from loadtest.tables import Record
from services.engine.attention.base import PagedQueries
from services.engine.attention.cpu_attention import CpuAttention, CpuPlan
from services.engine.kernels.base import Scoring
from services.engine.kernels.cpu.huge_pages import allocate
from services.engine.kernels.cpu.isa import known_isa
from services.engine.kernels.cpu.openmp import loaded_openmp
from services.engine.kernels.load import make_operations, why_not_fused
from services.engine.models.architectures import parse_model_config
from services.engine.models.base import ModelInput
from services.engine.models.config import DecoderConfig
from services.engine.models.decoder import Decoder
from services.engine.models.experts import ExpertsMlp
from services.engine.models.experts_config import Experts
from services.engine.models.parts import GatedMlp, GroupedAttention
from services.engine.models.registry import load_weights, open_tensors
from services.engine.models.rope import inverse_frequencies, rotation
from services.engine.models.weights import DecoderWeights
from services.engine.runner.load_plan import kv_layout
from services.engine.runner.memory import keep_freed_memory
from services.protocol.model_files.open import open_model

_STEPS = ((1, 1), (16, 1), (64, 1), (1, 512), (4, 512))  # rows, and new tokens of each
_BLOCK_SIZE = 16
_MOST_RECORDED = 160  # tokens, as in the decoder
_SECONDS, _LEAST_RUNS = 0.6, 10  # of each part
# Name, a function that runs the part, and its limit in seconds, or 0. Of the whole: what it has beyond its parts.
Part = tuple[str, Callable[[], object], float]


def prepare(model: Path, dtype: torch.dtype) -> DecoderConfig:
    """Makes this process compute as a worker does, and reads what it computes. Ends it where no kernel runs."""
    keep_freed_memory()
    openmp = loaded_openmp()
    if openmp is not None:
        openmp.set_num_threads(len(os.sched_getaffinity(0)))
        openmp.spin()
    config = parse_model_config(open_model(model).config())
    if not isinstance(config, DecoderConfig):
        raise SystemExit(f"{config.architecture} is not measured here")
    if reason := why_not_fused(str(dtype).removeprefix("torch.")):
        raise SystemExit(f"no kernels run here: {reason}")
    return config


def measure(model: Path, context: int, dtype: torch.dtype) -> list[Record]:
    """Measures all parts of each step. context: tokens of each sequence before a step that decodes.

    model: a checkpoint, or a directory with a config.json alone, whose weights are then random.
    """
    config, name = prepare(model, dtype), str(dtype).removeprefix("torch.")
    from loadtest.micro.peaks import copy_rate, peak_flops  # imported late: numba compiles it

    with torch.inference_mode():
        has_weights = not model.is_dir() or any(model.glob("*.safetensors"))
        with open_tensors(model if has_weights else None, config, torch.device("cpu")) as checkpoint:
            weights = load_weights(checkpoint, config, dtype, fused=True)
        assert isinstance(weights, DecoderWeights)
        limits = _Limits(config, dtype, copy_rate(), peak_flops(name))
        rates: Record = {
            "part": f"rates of the machine, {known_isa().name}, {name}",
            "copied_gb_per_s": limits.copied / 1e9,
            "tflops": limits.flops / 1e12,
        }
        return [
            rates,
            *(
                record
                for rows, new in _STEPS
                for record in _of_step(MeasuredStep(config, weights, rows, new, context), limits)
            ),
        ]


class _Limits:
    """Least seconds of a step's parts, over all layers."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, copied: float, flops: float) -> None:
        """Takes the machine's rates. copied: bytes a second, read and written; flops: operations a second."""
        self.copied, self.flops = copied, flops
        self._config = config
        self._itemsize: int = dtype.itemsize

    def product(self, out: int, depth: int, tokens: int) -> float:
        """Returns the limit of one layer's product."""
        num_bytes, operations = out * depth * self._itemsize, 2 * out * depth * tokens
        return max(num_bytes / self.copied, operations / self.flops)

    def experts(self, experts: Experts, distinct: int, tokens: int) -> float:
        """Returns the limit of one layer's experts: those that a step chooses are read once, with the shared one."""
        of_expert, of_shared = (
            3 * self._config.hidden_size * columns for columns in (experts.intermediate_size, experts.shared_size)
        )
        num_bytes = (distinct * of_expert + of_shared) * self._itemsize
        operations = 2 * tokens * (experts.top_k * of_expert + of_shared)
        return max(num_bytes / self.copied, operations / self.flops)

    def attention(self, rows: int, new: int, context: int) -> float:
        """Returns the limit of one layer's attention: KV is read once, a token meets all keys up to its own."""
        config = self._config
        kv_bytes = rows * (context + new) * 2 * config.num_kv_heads * config.head_dim * self._itemsize
        keys = rows * (context * new + new * (new + 1) / 2)
        operations = 4 * keys * config.num_heads * config.head_dim
        return max(kv_bytes / self.copied, operations / self.flops)


def _of_step(step: "MeasuredStep", limits: _Limits) -> list[Record]:
    records: list[Record] = []
    total_limit = 0.0
    for name, run, limit_s in step.parts(limits):
        total_limit += limit_s
        limit = total_limit if run == step.whole else limit_s
        took = _median_s(run)
        record: Record = {"rows": step.rows, "new_tokens": step.new, "part": name, "ms": took * 1e3}
        records.append(record | ({"limit_ms": limit * 1e3, "share": limit / took} if limit else {}))
    return records


class MeasuredStep:
    """A step of sequences that have `new` tokens each: one after `context` others, or several of a prompt."""

    def __init__(self, config: DecoderConfig, weights: DecoderWeights, rows: int, new: int, context: int) -> None:
        self.rows, self.new, self._context = rows, new, context if new == 1 else 0
        self._config, self._weights = config, weights
        # Blocks are whole where a worker's are slices, too: the bytes that are read are the same.
        layout = replace(kv_layout(config, _BLOCK_SIZE, weights.dtype), num_layers=config.num_layers, groups=None)
        length = self._context + new
        width = -(-length // _BLOCK_SIZE)
        num_blocks = rows * width + 1
        pool = torch.from_numpy(allocate(num_blocks * layout.block_bytes)).view(weights.dtype)
        pool.fill_(0.5)  # memory that was never written is one page of zeros, which is always in a cache
        self._attention = CpuAttention(
            pool.view(layout.shape(num_blocks)), layout, config.num_heads, Scoring(config.scale), fused=True
        )
        self._operations = make_operations(layout.dtype, fused=True)
        self._model = Decoder(config, weights, self._attention, self._operations)
        self._queries = PagedQueries(
            np.arange(rows + 1, dtype=np.int32) * np.int32(new),
            np.full(rows, length, dtype=np.int32),
            np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32)).reshape(rows, width),
        )
        self._tokens = rows * new
        self._ids = torch.randint(config.vocab_size, (self._tokens,))
        self._positions = torch.arange(self._context, length, dtype=torch.int32).repeat(rows)
        assert config.rope is not None
        self._turn = rotation(inverse_frequencies(config.rope, config.head_dim), self._positions, weights.dtype)
        self._x = torch.randn(self._tokens, config.hidden_size).to(weights.dtype)
        self._attended = torch.randn(self._tokens, config.num_heads * config.head_dim).to(weights.dtype)
        self._normed, self._fed = self._result(config.hidden_size), self._result(config.intermediate_size)
        heads = config.num_heads + 2 * config.num_kv_heads
        self._heads = self._result(heads * config.head_dim).unflatten(1, (heads, config.head_dim))
        self._plan = self.prepare()

    def parts(self, limits: _Limits) -> list[Part]:
        """Lists the parts in the order of a step, and the whole step last."""
        config, layers, tokens = self._config, self._weights.layers, self._tokens
        hidden, fed, attended = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        silu_mul, count = self._operations.silu_mul, config.num_layers
        attentions = self._attentions()
        mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, GatedMlp)]
        products: list[tuple[str, Callable[[], object], tuple[int, int]]] = [
            ("Q, K, V", lambda: [one.qkv(self._normed) for one in attentions], (heads, hidden)),
            ("output", lambda: [one.output(self._attended) for one in attentions], (hidden, attended)),
        ]
        if config.experts is None:
            products += [
                (
                    "gate, up, SiLU",
                    lambda: [mlp.gate_up.gated(self._normed, silu_mul) for mlp in mlps],
                    (2 * fed, hidden),
                ),
                ("down", lambda: [mlp.down(self._fed) for mlp in mlps], (hidden, fed)),
            ]
        product = limits.product
        # The whole pass computes of the last layer only K and V for all tokens, the rest for each sequence's last one.
        only_last = [(attended, hidden), *(shape for _, _, shape in products[1:])]
        left_out = sum(product(*shape, tokens) - product(*shape, self.rows) for shape in only_last)
        if self.new > 1:
            left_out += limits.attention(self.rows, self.new, 0) - limits.attention(self.rows, 1, self.new - 1)
        return [
            ("index work", self.prepare, 0.0),
            *((name, run, product(*shape, tokens) * count) for name, run, shape in products),
            *self._parts_of_experts(limits),
            ("attention", self.attention, limits.attention(self.rows, self.new, self._context) * count),
            ("norms, rotation, KV write", self.small, 0.0),
            ("output layer", self.head, product(config.vocab_size, hidden, self.rows)),
            ("whole forward pass", self.whole, -left_out),
        ]

    def _parts_of_experts(self, limits: _Limits) -> list[Part]:
        """Lists the experts of all layers, with their router and the shared one, as a step runs them; none if the model
        has none. The limit counts experts that this step's tokens choose.
        """
        experts, operations = self._config.experts, self._operations
        if experts is None:
            return []
        mlps = [layer.mlp for layer in self._weights.layers if isinstance(layer.mlp, ExpertsMlp)]

        def body() -> Tensor:
            return [mlp.forward(self._normed, operations) for mlp in mlps][-1]

        def run() -> Tensor:
            return (
                body() if self._tokens > _MOST_RECORDED else operations.replay((self, "experts"), (self._normed,), body)
            )

        from services.engine.kernels.cpu.packed_experts import PackedExperts  # imported late: there may be no kernels

        limit_s = 0.0
        for mlp in mlps:
            kernel = mlp.experts.kernel
            assert isinstance(kernel, PackedExperts)
            before = kernel.counts.clone()
            mlp.forward(self._normed, operations)
            limit_s += limits.experts(experts, int((kernel.counts != before).sum()), self._tokens)
        return [("experts", run, limit_s)]

    def _result(self, width: int) -> Tensor:
        """Makes random rows that lie in memory as a kernel's results do."""
        from services.engine.kernels.cpu.recording import empty_rows  # imported late: there may be no kernels here

        return empty_rows(self._tokens, width, self._weights.dtype).normal_()

    def prepare(self) -> CpuPlan:
        return self._attention.prepare(self._queries, self._config.layer_windows)

    def attention(self) -> None:
        q, k, v = self._split()
        for layer in range(self._config.num_layers):
            self._attention.attend(self._plan, layer, q, k, v)

    def small(self) -> None:
        config = self._config
        _, k, v = self._split()
        attentions = self._attentions()
        for index, layer in enumerate(self._weights.layers):
            rotated = self._heads[:, : config.num_heads + config.num_kv_heads]
            self._operations.rotate(rotated, *self._turn, attentions[index].qk_norm, config.rms_norm_eps)
            self._attention.write(self._plan, index, k, v)
            self._operations.add_norm(self._x, self._normed, layer.mlp_norm, config.rms_norm_eps)
            self._operations.add_norm(self._x, self._normed, layer.input_norm, config.rms_norm_eps)
            self._x.fill_(0.5)

    def _attentions(self) -> list[GroupedAttention]:
        parts = [layer.attention for layer in self._weights.layers]
        return [part for part in parts if isinstance(part, GroupedAttention)]

    def products(self) -> Tensor:
        """Runs the products of all layers and the output layer, as a step that decodes runs them, and nothing else."""
        silu_mul = self._operations.silu_mul

        def body() -> Tensor:
            for layer in self._weights.layers:
                attention, mlp = layer.attention, layer.mlp
                assert isinstance(attention, GroupedAttention)
                assert isinstance(mlp, GatedMlp)
                attention.qkv(self._normed)
                attention.output(self._attended)
                mlp.gate_up.gated(self._normed, silu_mul)
                mlp.down(self._fed)
            return self._model.logits(self._normed[: self.rows])

        inputs = (self._normed, self._attended, self._fed)
        return body() if self._tokens > _MOST_RECORDED else self._operations.replay((self, "products"), inputs, body)

    def head(self) -> None:
        self._model.logits(self._normed[: self.rows])

    def whole(self) -> None:
        if self.new == 1:
            self._model.all_logits(self._input(None))
            return
        last = torch.arange(self.new - 1, self._tokens, self.new)
        self._model.logits(self._model.forward(self._input(last)))

    def _input(self, queries: Tensor | None) -> ModelInput:
        starts = torch.from_numpy(self._queries.query_starts)
        return ModelInput(self._ids, self._positions, starts, self.prepare(), queries)

    def _split(self) -> list[Tensor]:
        config = self._config
        return list(self._heads.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1))


def _median_s(run: Callable[[], object]) -> float:
    run()
    times: list[float] = []
    while len(times) < _LEAST_RUNS or sum(times) < _SECONDS:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return float(np.median(times))
