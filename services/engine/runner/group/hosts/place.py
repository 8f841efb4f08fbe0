"""The place of a process in a group of ranks on several hosts."""

from dataclasses import dataclass

from services.tls.rank_contexts import RankTls


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostPlace:
    """A rank, and the address at which rank 0 waits for the others."""

    rank: int
    size: int
    host: str
    port: int
    tls: RankTls | None = None  # of the connections between ranks; None: plain text

    @property
    def address(self) -> str:
        """Returns HOST:PORT."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
