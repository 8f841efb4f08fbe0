"""The configuration of a rank above 0, which it gets from rank 0, and its answer when it has loaded."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from services.config import LogFormat
from services.config.engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """The configuration of one rank. Descriptors are open in its process under the same numbers."""

    engine: EngineConfig
    log_format: LogFormat
    rank: int
    num_blocks: int  # of the pool of KV blocks
    pool: int  # descriptor of the rank's pool
    steps: int  # of the ring of steps
    sums: (
        int | None
    )  # of the memory by which ranks of its stage add up; None: they do so by Gloo, or it is the only one
    store: Path | None  # the file by which Gloo's ranks find each other
    hidden: int | None  # of the memory by which hidden states go from stage to stage; None: there is one stage
    answer: int = -1  # of the pipe for the answer; it stays open as long as the process lives

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Returns all descriptors that the process needs."""
        others = (each for each in (self.sums, self.hidden) if each is not None)
        return self.pool, self.steps, self.answer, *others


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnswer:
    """The answer of a rank once it has loaded, a line."""

    refused: str = ""  # why it does not serve; empty: it does
    weight_bytes: int = 0
    not_shared: str | None = None  # see LoadedWeights
    notices: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """Returns the line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def unpack(cls, line: bytes) -> Self:
        """Reads the line. Raises ValueError for anything else."""
        said = json.loads(line)
        return cls(**{**said, "notices": tuple(said["notices"])})
