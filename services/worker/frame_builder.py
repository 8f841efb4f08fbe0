"""Cuts the rows that the engine sampled into one frame for each gateway, without a Python loop over rows."""

from collections.abc import Callable
from dataclasses import fields

import numpy as np

from kvtransfer.ids import GatewayId
from services.engine.runner.base import StepLogprobs
from services.engine.sequences.outputs import Embedded, StepRows
from services.protocol.frames import Embeddings, Failure, Frame, Load, PackedLogprobs, Timing


class PendingFrames:
    """Rows and failures that gateways are to be told, and the gateways whose streams are open."""

    def __init__(self) -> None:
        self.gateways: set[GatewayId] = set()
        self.rows: list[StepRows] = []
        self._failures: dict[GatewayId, list[Failure]] = {}
        self._embedded: dict[GatewayId, list[Embedded]] = {}
        self._timings: dict[GatewayId, list[Timing]] = {}
        self._greeted: set[GatewayId] = set()  # gateways that are to be told of the load

    def add_gateway(self, gateway: GatewayId) -> None:
        """Notes that a gateway's stream began; its first frame tells it of the load."""
        self.gateways.add(gateway)
        self._greeted.add(gateway)

    def remove_gateway(self, gateway: GatewayId) -> None:
        """Drops what a gateway whose stream broke was to be told."""
        self.gateways.discard(gateway)
        self._failures.pop(gateway, None)
        self._embedded.pop(gateway, None)
        self._timings.pop(gateway, None)

    def fail(self, gateway: GatewayId, failure: Failure) -> None:
        """Adds a failure."""
        self._failures.setdefault(gateway, []).append(failure)

    def add_timing(self, gateway: GatewayId, timing: Timing) -> None:
        """Adds the timing of an attempt, of which there is a row, an embedding or a failure."""
        self._timings.setdefault(gateway, []).append(timing)

    def add_embedding(self, embedded: Embedded) -> None:
        """Adds the embedding of a prompt."""
        self._embedded.setdefault(embedded.id.gateway, []).append(embedded)

    def tell_load(self) -> None:
        """Puts the load into the next frames of all gateways."""
        self._greeted |= self.gateways

    def take(self, make_load: Callable[[], Load], *, to_all: bool) -> dict[GatewayId, Frame]:
        """Makes the frames since the last call: for gateways that have something to hear or are new, or for all."""
        rows, self.rows = self.rows, []
        failures, self._failures = self._failures, {}
        embedded, self._embedded = self._embedded, {}
        timings, self._timings = self._timings, {}
        concerned = self._greeted.union(failures, embedded)
        for part in rows:
            concerned.update(part.gateways.tolist() if part.gateway is None else (part.gateway,))
        self._greeted.clear()
        if to_all:
            concerned |= self.gateways
        if not concerned:
            return {}
        load = make_load()
        frames = {
            gateway: build_frame(rows, gateway, failures.get(gateway, []), load)
            for gateway in concerned & self.gateways
        }
        for gateway in timings.keys() & frames.keys():
            frames[gateway].timings = timings[gateway]
        for gateway, finished in embedded.items():
            if gateway in frames:
                frames[gateway].embeddings = _embeddings(finished)
        return frames


def build_frame(rows: list[StepRows], gateway: GatewayId, failures: list[Failure], load: Load) -> Frame:
    """Makes a frame of everything in `rows` that is for this gateway, in order."""
    parts = [part if part.gateway == gateway else _rows_for(part, gateway) for part in rows]
    return Frame(
        handles=_joined([part.handles for part in parts], np.uint32),
        positions=_joined([part.positions for part in parts], np.uint32),
        counts=_joined([part.counts for part in parts], np.uint32),
        tokens=_joined([part.tokens for part in parts], np.int32),
        finish=_joined([part.finish for part in parts], np.uint8),
        cached=_joined([part.cached for part in parts], np.int32),
        logprobs=_pack_logprobs(parts),
        failures=failures,
        load=load,
    )


def _embeddings(embedded: list[Embedded]) -> Embeddings:
    return Embeddings(
        handles=np.array([each.id.handle for each in embedded], dtype=np.uint32),
        cached=np.array([each.cached for each in embedded], dtype=np.int32),
        values=np.stack([each.values for each in embedded]),
    )


def _joined(columns: list[np.ndarray], dtype: type) -> np.ndarray:
    if len(columns) == 1:
        return columns[0]  # the usual case: a step, and one gateway
    return np.concatenate(columns) if columns else np.zeros(0, dtype)


def _rows_for(part: StepRows, gateway: GatewayId) -> StepRows:
    mine = part.gateways == np.uint64(gateway)
    tokens = np.repeat(mine, part.counts)
    logprobs = part.logprobs and part.logprobs.rows(tokens)
    columns = {
        field.name: getattr(part, field.name)[mine]
        for field in fields(StepRows)
        if field.name not in ("gateway", "tokens", "logprobs")
    }
    return StepRows(gateway=gateway, tokens=part.tokens[tokens], logprobs=logprobs, **columns)


def _pack_logprobs(parts: list[StepRows]) -> PackedLogprobs | None:
    of_tokens = [(part, part.logprobs) for part in parts if part.logprobs is not None]
    if not of_tokens:
        return None
    sampled, top_ids, top, ranks = [], [], [], []
    for part, logprobs in of_tokens:
        widths = np.repeat(part.widths, part.counts)
        asked = widths >= 0
        sampled.append(logprobs.sampled[asked])
        row_ids, row_top = _alternatives(logprobs, widths)
        top_ids.append(row_ids)
        top.append(row_top)
        ranks.append(np.zeros(len(sampled[-1]), np.int32) if logprobs.ranks is None else logprobs.ranks[asked])
    any_ranks = any(logprobs.ranks is not None for _, logprobs in of_tokens)
    all_widths = [part.widths for part in parts]
    return PackedLogprobs(
        widths=np.concatenate(all_widths),
        sampled=np.concatenate(sampled),
        top_ids=np.concatenate(top_ids),
        top=np.concatenate(top),
        ranks=np.concatenate(ranks) if any_ranks else None,
    )


def _alternatives(logprobs: StepLogprobs, widths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids and the logprobs of all rows' alternatives, one row after the other."""
    if not logprobs.wide:
        inside = np.arange(logprobs.top_ids.shape[1]) < widths[:, None]
        return logprobs.top_ids[inside], logprobs.top[inside]
    rows = [logprobs.alternatives(row, max(0, width)) for row, width in enumerate(widths.tolist())]
    return np.concatenate([ids for ids, _ in rows]), np.concatenate([values for _, values in rows])
