"""Pairs that are compared: Baton in one of its modes, and a peer in each of its settings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from loadtest.compare.baton import Baton
from loadtest.compare.llama_cpp import LlamaCpp, Weights
from loadtest.compare.ratios import Contest
from loadtest.compare.servers import Server
from loadtest.compare.vllm import BLOCK_SIZES, VllmAlone, VllmPair


@dataclass(frozen=True, slots=True)
class Match:
    """Baton in one mode, and a peer in each of its settings."""

    title: str
    baton: Server
    peers: tuple[Server, ...]

    @property
    def contest(self) -> Contest:
        """The match by the names of its servers."""
        return Contest(self.title, self.baton.name, tuple(peer.name for peer in self.peers))


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers beside Baton; None for one that takes no part."""

    vllm: Path | None  # a virtual environment
    llama_server: Path | None
    weights: Weights | None  # llama.cpp's


def matches(model: Path, peers: Peers, *, alone: bool) -> list[Match]:
    """Lists matches in the order in which servers take turns: Baton in a mode, then the peers that it is compared with.

    alone: with a match of forced handoff against Baton without handoff.
    """
    forced, automatic, never = (Baton(model, handoff) for handoff in ("always", "auto", "never"))
    found = []
    if peers.vllm is not None:
        pairs = tuple(VllmPair(peers.vllm, model, size) for size in BLOCK_SIZES)
        single = tuple(VllmAlone(peers.vllm, model, size) for size in BLOCK_SIZES)
        found.append(Match("Handoff forced, against vLLM's own pair", forced, pairs))
        found.append(Match("Automatic routing, against vLLM alone", automatic, single))
    if peers.llama_server is not None and peers.weights is not None:
        found += _with_llama(peers.llama_server, peers.weights, automatic)
    if alone:
        found.append(Match("Handoff forced, against the same engine alone", forced, (never,)))
    return found


def chosen(every: Sequence[Match], names: Sequence[str]) -> list[Match]:
    """Keeps the peers with these names, and the matches that have one. Raises ValueError for a name that is none."""
    known = [peer.name for match in every for peer in match.peers]
    if unknown := set(names) - set(known):
        raise ValueError(f"no peer {min(unknown)!r}; there are {', '.join(known)}")
    kept = [replace(match, peers=tuple(peer for peer in match.peers if peer.name in names)) for match in every]
    return [match for match in kept if match.peers]


def servers(every: Sequence[Match]) -> list[Server]:
    """Lists the servers of all matches in turn, each once."""
    return list(dict.fromkeys(server for match in every for server in (match.baton, *match.peers)))


def _with_llama(program: Path, weights: Weights, baton: Server) -> list[Match]:
    files = (
        (weights.own, "same-file", "Automatic routing, against llama.cpp with the same GGUF file"),
        (weights.bf16, "bf16", "Automatic routing, against llama.cpp in BF16"),
        (
            weights.q4_1,
            "q4_1",
            "Automatic routing in bfloat16, beside llama.cpp in Q4_1: a third of the bytes, and other numbers",
        ),
    )
    return [Match(title, baton, (LlamaCpp(program, file, kind),)) for file, kind, title in files if file is not None]
