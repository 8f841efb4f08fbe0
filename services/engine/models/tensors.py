"""A checkpoint's tensors in a model's form: checked, cast, fused, and packed for the matrix library.

All tensors are checked before the first is read, so a checkpoint that does not fit fails at once.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from services.engine.kernels.ranks import RankLink
from services.engine.models.embedding import Embedding, RankTokens
from services.engine.models.encoder_config import EncoderConfig
from services.engine.models.experts_config import Experts
from services.engine.models.grouped_mlp import (
    ExpertCodes,
    ExpertsKernel,
    ExpertWeights,
    GroupedMlp,
    coded_experts,
    packed_experts,
)
from services.engine.models.kv_scales import is_kv_scale
from services.engine.models.linear import Join, Linear, coded_kernel, coded_linear, coded_panels, of_panels
from services.engine.models.makers import Makers
from services.engine.models.model_config import ModelConfig
from services.engine.models.shapes import Shapes, Share, Shares
from services.engine.models.tensor_source import TensorSource
from services.engine.quantization.codes import CodedMatrix, stacked
from services.engine.quantization.kept import KeptForms
from services.protocol.model_files.base import ModelError

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_POOLER = "model.pooler.dense."
_WHOLE = Share()
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class _Found(NamedTuple):
    """A matrix that is stored as codes, without them."""

    form: str
    nbytes: int

    @classmethod
    def of(cls, matrix: CodedMatrix) -> Self:
        return cls(matrix.form, matrix.nbytes)


class Tensors:
    """Reads tensors of one source in one dtype. fused: linear layers and experts may be a CPU's kernels.

    shares: what a rank reads of the tensors. on_read: hears of the bytes of each tensor, as it is in memory. kept:
    hears how codes are kept.
    """

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        *,
        fused: bool,
        makers: Makers = Makers(),  # noqa: B008 -- frozen
        shares: Shares,
        on_read: Callable[[int], None],
        kept: KeptForms | None = None,
    ) -> None:
        self.dtype = dtype
        self._source = source
        self._fused = fused
        self._make_product = makers.product
        self._make_experts = packed_experts if fused and makers.product is None else makers.experts
        self._make_coded = makers.coded
        self._make_coded_experts = coded_experts if fused and makers.coded is None else makers.coded_experts
        self._shares = shares
        # Nothing is joined where nothing is shared out: tensors of other stages are not.
        self.ranks = RankLink() if any(share is not None for share in shares.values()) else None
        self._on_read = on_read
        self._kept = kept or KeptForms()

    def linear(self, *names: str, bias: bool, joined: bool = True) -> Linear:
        """Makes a linear layer of the rows of these, one below the other: `{name}.weight`, and `{name}.bias` if it has
        a bias, which may be another rank's. Where ranks share its inputs, the layer adds up their results if `joined`.

        Fewer and larger products are faster.
        """
        weights = [f"{name}.weight" for name in names]
        own_biases = [f"{name}.bias" for name in names if bias and self.has(f"{name}.bias")]
        biases = self.rows(*own_biases) if own_biases else None
        coded = self._coded_linear(weights, biases)
        layer = self.product(self.rows(*weights), biases) if coded is None else coded
        if self.ranks is None or not joined or not self._cuts_inputs(weights):
            return layer
        return layer.joined(Join(self.ranks))

    def product(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Makes a linear layer of a weight [out, in] and a bias [out] that were read, which it takes over."""
        return Linear(weight, bias, fused=self._fused, make_product=self._make_product)

    @property
    def is_fused(self) -> bool:
        """Returns True if products may be a CPU's kernels."""
        return self._fused

    def router(self, *names: str, bias: bool, wide: bool) -> Linear:
        """Makes the product of a router of experts, of rows like those of `linear`. It never uses `Makers.product`.

        wide: the product is float32.
        """
        weight = self.rows(*(f"{name}.weight" for name in names))
        biases = self.rows(*(f"{name}.bias" for name in names)) if bias else None
        dtype = torch.float32 if wide else self.dtype
        return Linear(weight.to(dtype), None if biases is None else biases.to(dtype), fused=self._fused)

    def grouped_mlp(
        self,
        experts: Experts,
        read: Callable[[int], ExpertWeights],
        read_codes: Callable[[int], ExpertCodes],
    ) -> GroupedMlp:
        """Makes the MLPs of a layer's experts: see `GroupedMlp`. Both functions read one expert."""
        return GroupedMlp(
            experts,
            read,
            make_kernel=self._make_experts,
            make_product=self._make_product,
            kernel=self._coded_experts(experts, read_codes),
            join=None if self.ranks is None else Join(self.ranks),
        )

    def _coded_experts(self, experts: Experts, read_codes: Callable[[int], ExpertCodes]) -> ExpertsKernel | None:
        """Makes a kernel of experts in codes; None: they are stored in numbers, or no kernel multiplies them so. Of the
        codes that were read, nothing is kept here.
        """
        if self._make_coded_experts is None:
            return None
        found: list[_Found] = []

        def read(expert: int) -> ExpertCodes | None:
            codes = read_codes(expert)
            found.extend(map(_Found.of, codes.matrices))
            return codes if codes.is_whole else None

        kernel = self._make_coded_experts(experts, read, self.dtype)
        self._count(found, is_kept=kernel is not None)
        return kernel

    def codes(self, name: str, expert: int | None = None) -> list[CodedMatrix]:
        """Reads a matrix as codes, or a rank's share of it in pieces of rows; none: it is stored in numbers.

        expert: of a tensor of all experts, [experts, in, out], the one whose matrix [out, in] is read.
        """
        if expert is None:
            return self._coded([name]) or []
        share = self._share(name)
        assert share is not None, f"{name} is another rank's"
        found = self._source.coded(name, slice(expert, expert + 1), share.columns)
        return [] if found is None else [found]

    def of_expert(self, name: str, expert: int) -> Tensor:
        """Reads an expert's numbers, [in, out], or a rank's share of its inputs, of a tensor of all experts."""
        share = self._share(name)
        assert share is not None, f"{name} is another rank's"
        tensor = self._source.read(name, self.dtype, slice(expert, expert + 1), share.columns)[0]
        self._on_read(tensor.nbytes)
        return tensor.clone() if self._source.lends else tensor

    def embedding(self, name: str) -> Embedding:
        """Reads the embedding. It is kept in codes if it is stored so and a CPU's kernel decodes them."""
        if self._fused and self._make_coded is None and (found := self._coded([name])) is not None:
            panels = coded_panels(found, self.dtype)
            self._count(map(_Found.of, found), is_kept=panels is not None)
            if panels is not None:
                return Embedding(name, panels, self.dtype, self._own_tokens(name))
        return Embedding(name, self.vector(name), self.dtype, self._own_tokens(name))

    def _own_tokens(self, name: str) -> RankTokens | None:
        share = self._share(name)
        if self.ranks is None or share is None or share.rows is None:
            return None
        (rows,) = share.rows
        return RankTokens(range(rows.start, rows.stop), self.ranks)

    def head(self, tied: Embedding | None, vocab_size: int) -> Linear:
        """Makes the output layer, of the embedding itself if they are tied. It never uses `Makers.product`. Where ranks
        share its outputs, it has those of all ranks.
        """
        layer = self._own_head(tied)
        return layer if self.ranks is None else layer.joined(Join(self.ranks, vocab_size))

    def _own_head(self, tied: Embedding | None) -> Linear:
        if tied is not None and tied.panels is not None:
            return of_panels(tied.panels, self.dtype)
        if tied is None or self._make_coded is not None:
            coded = self._coded_linear([HEAD if tied is None else tied.name], None)
            if coded is not None:
                return coded
        weight = self._read(HEAD) if tied is None else tied.table
        assert weight is not None
        return Linear(weight, None, fused=self._fused)

    def vector(self, name: str) -> Tensor:
        """Reads a tensor, or a rank's share of it, unchanged. Copies it if the source lends it: a file may change once
        it is closed.
        """
        tensor = self._read(name)
        return tensor.clone() if self._source.lends else tensor

    def rows(self, *names: str) -> Tensor:
        """Reads the rows of these tensors, or a rank's share of them, one below the other."""
        return self.vector(names[0]) if len(names) == 1 else torch.cat([self._read(name) for name in names])

    def has(self, name: str) -> bool:
        """Returns False for a tensor that is another rank's."""
        return self._share(name) is not None

    def _coded_linear(self, names: Sequence[str], bias: Tensor | None) -> Linear | None:
        """Makes a linear layer of these matrices, one below the other; None: they are stored as numbers, or no kernel
        multiplies them.
        """
        if self._make_coded is None and not self._fused:
            return None
        if (found := self._coded(names)) is None:
            return None
        if self._make_coded is None:
            layer = coded_kernel(stacked(found), bias, self.dtype)
        else:
            layer = coded_linear(stacked(found), bias, self._make_coded)
        self._count(map(_Found.of, found), is_kept=layer is not None)
        return layer

    def _coded(self, names: Sequence[str]) -> list[CodedMatrix] | None:
        """Reads these matrices, or a rank's shares of them, as codes; None: they are stored as numbers."""
        found: list[CodedMatrix] = []
        for name in names:
            share = self._share(name)
            assert share is not None, f"{name} is another rank's"
            for rows in share.rows or (None,):
                piece = self._source.coded(name, rows, share.columns)
                if piece is None:
                    return None
                found.append(piece)
        return found

    def _count(self, found: Iterable["_Found"], *, is_kept: bool) -> None:
        """Tells how matrices that are stored as codes are kept."""
        for matrix in found:
            if is_kept:
                self._kept.keep(matrix.form)
                self._on_read(matrix.nbytes)
            else:
                self._kept.unpack(matrix.form)

    def _read(self, name: str) -> Tensor:
        share = self._share(name)
        assert share is not None, f"{name} is another rank's"
        pieces = [self._source.read(name, self.dtype, rows, share.columns) for rows in share.rows or (None,)]
        tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        self._on_read(tensor.nbytes)
        return tensor

    def _cuts_inputs(self, names: Sequence[str]) -> bool:
        """Returns True if ranks share the inputs of the matrices that are one below the other."""
        shares = [self._share(name) for name in names]
        cut = {share is not None and share.columns is not None for share in shares}
        assert len(cut) == 1, f"some of {', '.join(names)} are cut, others are not"
        return cut.pop()

    def _share(self, name: str) -> Share | None:
        return self._shares.get(name, _WHOLE)


def check_tensors(source: TensorSource, config: ModelConfig, expected: Shapes) -> None:
    """Raises ModelError for any tensor that is missing, misshapen or unexpected."""
    for name, shape in expected.items():
        source.check(name, shape)
    for name in sorted(source.names - expected.keys()):
        if not _is_no_weight(name, config):
            raise ModelError(
                f"{source.home(name)}: tensor {name} is not part of {config.architecture} as its configuration has it"
            )
    if config.tie_word_embeddings and HEAD in source.names:
        _check_tied(source, expected)


def _check_tied(source: TensorSource, expected: Shapes) -> None:
    """Raises ModelError if the head of a tied model is not the embedding: `transformers` would not tie them."""
    embedding = next(name for name in expected if name.endswith("embed_tokens.weight"))
    source.check(HEAD, expected[embedding])
    dtype = source.dtype(embedding)
    # By bits, as NaN is not equal to itself; on the host, where a device has room for one of them.
    head, embedded = (source.read(name, dtype).cpu().view(torch.uint8) for name in (HEAD, embedding))
    if not torch.equal(head, embedded):
        raise ModelError(
            f"{source.home(HEAD)}: {HEAD} differs from the embedding, but config.json has tie_word_embeddings true: "
            "set it to false, or remove the tensor"
        )


def _is_no_weight(name: str, config: ModelConfig) -> bool:
    """Returns True for tensors that repeat known values (stored rotary frequencies and positions, the head of a tied
    model), for layers that predict further tokens, for an encoder's pooler, which embeddings do without, and for
    scales of FP8 KV, which `read_kv_scales` reads if KV is FP8.
    """
    of_layer = _OF_LAYER.match(name)
    if of_layer and 0 <= int(of_layer[1]) - config.num_layers < config.num_mtp_layers:
        return True
    return (
        name.endswith((".rotary_emb.inv_freq", ".embeddings.position_ids", ".embeddings.token_type_ids"))
        or (name.startswith(_POOLER) and isinstance(config, EncoderConfig))
        or (name == HEAD and config.tie_word_embeddings)
        or is_kv_scale(name, config)
    )
