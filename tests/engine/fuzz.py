"""Random traffic through an engine with few blocks: everything that can happen to a request, at any time.

Each seed is an engine of its own: its role, its sizes, its requests, and what happens to them. After every step the
blocks, the prefix cache, the states and the slots are checked against each other, and in the end every token.

    python -m tests.engine.fuzz --seeds 10000 --first 0
    python -m tests.engine.fuzz --seeds 10000 --first 0 --slices      layers with windows of their own
"""

import argparse
import random
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId
from kvtransfer.layer_groups import LayerGroups
from kvtransfer.messages import Announcement, FirstToken
from services.config import Pooling
from services.engine.runner.simulated import SLICE_APART, SimulatedRunner
from services.engine.schedulers.decode import DecodeScheduler
from services.engine.schedulers.prefill import PrefillScheduler
from services.engine.sequences.batch_state import Phase
from services.engine.sequences.request import Kind
from services.engine.sequences.request_table import State
from tests.engine.drafting import DraftingScheduler
from tests.engine.harness import GATEWAY, make_engine

STEPS = 60
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def _groups(size: int) -> list[LayerGroups]:
    """Layers in groups, for blocks of so many tokens."""
    full: tuple[tuple[int, ...], ...] = ((0,),)
    return [
        LayerGroups((None, 3 * size), (full, ((1,), (2,)))),
        LayerGroups((None, 2 * size + 1), (((0,), (3,)), ((1,), (2,), (4,)))),
        LayerGroups((None, 4 * size, 1), (full, ((1,),), ((2,), (3,)))),
        LayerGroups((7 * size, 2), (full, ((1,), (2,)))),
    ]


def id_of(handle: int) -> AttemptId:
    return AttemptId(GatewayId(GATEWAY), handle)


@dataclass(frozen=True)
class Choice:
    """What was asked for under one handle."""

    group: int  # the handle of its prompt; its own where it is alone
    kind: Kind
    tokens: list[int] | None  # what it must say; None: not computed here
    count: int  # of tokens, where none of them stops it


@dataclass
class Oracle:
    """Says what follows a prompt, by the definition of `SimulatedRunner` alone."""

    vocab_size: int
    windows: tuple[int | None, ...]  # of each slice of a block
    max_len: int

    def says(self, prompt: list[int], count: int, seed: int, stops: tuple[int, ...]) -> list[int]:
        tokens, said = list(prompt), list[int]()
        while len(said) < count and len(tokens) < self.max_len and not (said and said[-1] in stops):
            chance = ((seed + len(tokens) + 1) & _MASK) * _MULTIPLIER & _MASK
            said.append((self.follower(tokens) + (chance >> 33) % self.vocab_size) % self.vocab_size)
            tokens.append(said[-1])
        return said

    def follower(self, tokens: list[int]) -> int:
        """The likeliest token after these."""
        total = 0
        for number, window in enumerate(self.windows):
            seen = range(0 if window is None else max(0, len(tokens) - window), len(tokens))
            total += sum(self._mixed(tokens[position], position + number * SLICE_APART) for position in seen)
        return (((total & _MASK) * _MULTIPLIER & _MASK) >> 33) % self.vocab_size

    def _mixed(self, token: int, position: int) -> int:
        mixed = (token + 1) * _MULTIPLIER & _MASK
        return (mixed ^ (mixed >> 29)) * (2 * position + 1) & _MASK


@dataclass
class Traffic:
    """One seed's engine, and what was asked of it."""

    seed: int
    in_slices: bool = False  # layers have windows of their own
    asked: dict[int, Choice] = field(default_factory=dict)  # by handle
    prompts: dict[int, list[int]] = field(default_factory=dict)  # by handle of a prompt
    to_embed: dict[int, tuple[list[int], Pooling]] = field(default_factory=dict)  # by handle
    ended: dict[int, int] = field(default_factory=dict)  # by handle of what was aborted: the tokens that it had
    leases: dict[int, list[Announcement]] = field(default_factory=dict)  # by handle of a prompt that is handed off
    quarantined: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.size = rng.choice([1, 2, 2, 4])
        self.produces = rng.random() < 0.25
        window = rng.choice([None, None, None, 3 * self.size]) if not self.produces else None
        self.groups = rng.choice(_groups(self.size)) if self.in_slices else None
        windows: tuple[int | None, ...] = (window,)
        if self.groups is not None:
            window = None
            windows = tuple(w for w, n in zip(self.groups.windows, self.groups.sizes, strict=True) for _ in range(n))
        self.num_slices = len(windows)
        max_len = rng.choice([12, 20, 32])
        vocab_size = rng.choice([20, 1000])
        budget = rng.choice([3, 8, 24])
        self.drafts = DraftingScheduler(budget, self._expected, right=0.8, vocab_size=vocab_size, seed=self.seed)
        decodes = self.drafts if rng.random() < 0.4 else DecodeScheduler(budget, prefill_chunk=budget)
        self.driven = make_engine(
            num_blocks=rng.choice([6, 10, 16, 32]) * self.num_slices + (self.seed % self.num_slices),
            block_size=self.size,
            max_num_seqs=rng.choice([3, 5, 9]),
            max_model_len=max_len,
            scheduler=PrefillScheduler(budget) if self.produces else decodes,
            vocab_size=vocab_size,
            window=window,
            groups=self.groups,
            depth=rng.choice([0, 1]),
        )
        self.vocab_size, self.max_len = vocab_size, max_len
        self.oracle = Oracle(vocab_size, windows, max_len)
        self.stems = [[rng.randrange(vocab_size) for _ in range(5 * self.size)] for _ in range(2)]
        self.sequences = self.driven.engine.sequences
        self.announced = 0

    def _expected(self, handle: int, position: int) -> list[int]:
        """Returns what a choice says from a position on, as far as that is computed here."""
        choice = self.asked.get(handle)
        if choice is None or choice.tokens is None:
            return []
        return choice.tokens[position - len(self.prompts[choice.group]) :]

    # What can happen.

    def submit(self) -> None:
        """Submits a prompt that mostly ends at a block border, with several choices or alone."""
        rng = self.rng
        prompt = list(rng.choice(self.stems)[: rng.choice([1, 2, 3, 4, 5]) * self.size])
        prompt = (prompt[: rng.randint(1, len(prompt))] if rng.random() < 0.2 else prompt)[: self.max_len]
        prompt += [rng.randrange(self.vocab_size) for _ in range(rng.choice([0, 0, 0, 1, 3]))]
        kind = rng.choice([Kind.PRODUCE, Kind.PRODUCE, Kind.LOCAL] if self.produces else [Kind.LOCAL, Kind.CONSUME])
        count = 1 if self.produces and kind is Kind.LOCAL else rng.randint(1, 12)
        seeds = tuple(rng.randrange(2**64) for _ in range(rng.choice([0, 0, 2, 3])))
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": rng.randrange(2**64)}
        stops = (rng.randrange(self.vocab_size),) if rng.random() < 0.3 else ()
        penalized = kind is Kind.LOCAL and rng.random() < 0.1
        if penalized:
            sampling["frequency_penalty"] = 1.5
        if kind is not Kind.CONSUME and rng.random() < 0.1:
            sampling["num_prompt_logprobs"] = 1
        paired_with = rng.randint(1, 2)
        handle = self.driven.submit(
            prompt, count, kind=kind, seeds=seeds, paired_with=paired_with, stop_token_ids=stops, **sampling
        )
        self.prompts[handle] = prompt
        own = dict(enumerate(seeds, handle + 1)) or {handle: int(sampling["seed"])}
        for each, seed in own.items():
            said = None if penalized else self.oracle.says(prompt, count, seed, stops)
            self.asked[each] = Choice(handle, kind, said, min(count, self.max_len - len(prompt)))

    def embed(self) -> None:
        """Submits a prompt to be embedded."""
        rng, pooling = self.rng, self.rng.choice(list(Pooling))
        prompt = list(rng.choice(self.stems)[: rng.randint(1, 5 * self.size)])[: self.max_len]
        self.to_embed[self.driven.embed(prompt, pooling)] = (prompt, pooling)

    def read_on(self, handle: int) -> None:
        """Brings one more block of a prompt that is received, or the last one with the first tokens."""
        slot = self.sequences.requests.slot_of(id_of(handle))
        assert slot is not None
        prompt, start = self.prompts[handle], int(self.sequences.batch.done[slot]) // self.size
        num_blocks = -(-len(prompt) // self.size)
        end = min(num_blocks, start + self.rng.randint(1, 3))
        runner, slices = self.driven.engine.runner, self.slices_to_read(slot)
        assert isinstance(runner, SimulatedRunner)
        for number, index, block in (each for each in slices if start <= each[1] < end):
            tokens = prompt[index * self.size : (index + 1) * self.size]
            runner._pool[block, 0, : len(tokens)] = tokens
            places = np.arange(index * self.size, (index + 1) * self.size)
            runner._pool[block, 1] = places + number * SLICE_APART
        self.driven.engine.arrived(id_of(handle), len([each for each in slices if each[1] < end]))
        if end == num_blocks:
            said = {each: choice.tokens or [] for each, choice in self.asked.items() if choice.group == handle}
            firsts = [FirstToken(each, tokens[0], None) for each, tokens in said.items() if len(tokens) > 1]
            self.driven.engine.ready(id_of(handle), tuple(firsts))

    def slices_to_read(self, slot: int) -> list[tuple[int, int, int]]:
        """All that a sequence that is received has of its prompt, in the order of its announcements: the number of a
        slice, the index of the block, and where the slice is.
        """
        batch = self.sequences.batch
        if self.groups is None:
            return [(0, index, block) for index, block in enumerate(batch.blocks(slot))]
        assert batch.slices is not None
        rows, length = batch.slices[batch.blocks(slot)], int(batch.length[slot])
        return [(number, index, int(rows[index, number])) for number, index in self.seen_after(length, len(rows))]

    def unread(self, slot: int) -> list[int]:
        """Where what has not arrived of a sequence that is received will be."""
        start = int(self.sequences.batch.done[slot]) // self.size
        return [block for _, index, block in self.slices_to_read(slot) if index >= start]

    def write_late(self) -> None:
        """Lets open reads write to blocks in quarantine, and to blocks whose content has not arrived."""
        runner, batch = self.driven.engine.runner, self.sequences.batch
        assert isinstance(runner, SimulatedRunner)
        targets = [block for blocks in self.quarantined for block in blocks]
        for slot in batch.slots_in(Phase.RECEIVING).tolist():
            targets += self.unread(slot)
        for block in targets:
            if self.rng.random() < 0.5:
                runner._pool[block] = self.rng.randrange(self.vocab_size)

    def abort(self, handle: int) -> None:
        """Aborts a choice or a prompt, in whatever state it is."""
        requests, batch = self.sequences.requests, self.sequences.batch
        record = requests.get(id_of(requests.queued_groups.ends_with(id_of(handle)).handle))
        quarantined: tuple[int, ...] = ()
        slot = None if record is None else record.slot
        if slot is not None and batch.phase[slot] == Phase.RECEIVING and self.rng.random() < 0.5:
            quarantined = tuple(self.unread(slot))
            self.quarantined.append(quarantined)
        ends = [handle] if handle in self.asked or handle in self.to_embed else []
        if requests.get(id_of(handle)) is not None:
            ends += [each for each, choice in self.asked.items() if choice.group == handle]
        self.driven.take()  # what was said before
        for each in ends:
            self.ended.setdefault(each, len(self.driven.tokens.get(each, [])))
        self.leases.pop(handle, None)
        if self.produces and handle in self.prompts and self.rng.random() < 0.3:
            self.sequences.stop_computing(id_of(handle))
        else:
            self.sequences.free(id_of(handle), quarantined)

    def known(self) -> list[int]:
        """Handles of all requests, and of choices that are still to begin."""
        known = {id.handle for id in self.sequences.requests.ids}
        return sorted(known | {each for each, choice in self.asked.items() if choice.group in known})

    def receiving(self) -> list[int]:
        batch = self.sequences.batch
        return [batch.request(slot).id.handle for slot in batch.slots_in(Phase.RECEIVING).tolist()]

    # Steps and checks.

    def happen(self) -> None:
        """Does some of all that can happen, and a step."""
        rng, requests = self.rng, self.sequences.requests
        if len(requests.ids) < 14 and rng.random() < 0.5:
            self.submit()
        if self.produces and len(requests.ids) < 14 and rng.random() < 0.2:
            self.embed()
        for request in requests.in_state(State.PARKED):
            if rng.random() < 0.5:
                requests.enqueue(request.id)
        if rng.random() < 0.6 and (receiving := self.receiving()):
            self.read_on(rng.choice(receiving))
        if rng.random() < 0.25 and (known := self.known()):
            self.abort(rng.choice(known))
        if self.leases and rng.random() < 0.3:
            self.release(rng.choice(sorted(self.leases)))
        if rng.random() < 0.5:
            self.admit()
        self.write_late()
        if self.quarantined and rng.random() < 0.3:
            self.sequences.free_quarantined(self.quarantined.pop(rng.randrange(len(self.quarantined))))
        self.step()

    def admit(self) -> None:
        """Admits requests while a step may be under way, as a worker does; blocks may arrive before that step ends."""
        self.driven.engine.admit(self.driven.now)
        self.driven.take()
        for handle in self.receiving():
            if self.rng.random() < 0.5:
                self.read_on(handle)

    def release(self, handle: int) -> None:
        """Ends the lease of a prompt that was handed off as a whole."""
        if self.leases[handle][-1].first_tokens:
            del self.leases[handle]
            self.sequences.free(id_of(handle))

    def step(self) -> bool:
        """Does a step; what was announced stays as it was announced, until it is released."""
        stepped = self.driven.step()
        for failure in self.driven.failures:
            for each, choice in self.asked.items():
                if failure.handle in (each, choice.group):
                    self.ended.setdefault(each, len(self.driven.tokens.get(each, [])))
            self.leases.pop(failure.handle, None)
        for announcement in self.driven.announced[self.announced :]:
            if id_of(announcement.id.handle) in self.sequences.requests.ids:
                self.leases.setdefault(announcement.id.handle, []).append(announcement)
        self.announced = len(self.driven.announced)
        for handle in [each for each in self.leases if id_of(each) not in self.sequences.requests.ids]:
            choices = [each for each, choice in self.asked.items() if choice.group == handle]
            assert all(each in self.ended or each in self.driven.finish for each in choices), f"{handle} was freed"
            del self.leases[handle]  # each choice ended with its first token
        runner, pool = self.driven.engine.runner, self.sequences.pool
        assert isinstance(runner, SimulatedRunner)
        for handle, announcements in self.leases.items():
            for part in announcements:
                assert pool.generations[list(part.blocks)].tolist() == list(part.generations), f"lease of {handle}"
                for (number, index), block in zip(
                    self.announceable(handle)[part.first_index :], part.blocks, strict=False
                ):
                    tokens = self.prompts[handle][index * self.size : (index + 1) * self.size]
                    assert runner._pool[block, 0, : len(tokens)].tolist() == tokens, f"announced blocks of {handle}"
                    assert runner._pool[block, 1, 0] == index * self.size + number * SLICE_APART, f"slice of {handle}"
        return stepped

    def announceable(self, handle: int) -> list[tuple[int, int]]:
        """What a consumer's first token sees of a prompt: numbers of slices and indices of blocks, in order."""
        length = len(self.prompts[handle])
        return self.seen_after(length, -(-length // self.size))

    def seen_after(self, length: int, num_blocks: int) -> list[tuple[int, int]]:
        """What the token after so many sees of the first blocks: numbers of slices and indices of blocks."""
        kept = 1 if self.groups is None else self.groups.sizes[0]  # whatever is seen of them
        return [
            (number, index)
            for index in range(num_blocks)
            for number, window in enumerate(self.oracle.windows)
            if number < kept or window is None or (index + 1) * self.size > length - window + 1
        ]

    def settle(self) -> None:
        """Brings whatever was begun to its end."""
        requests = self.sequences.requests
        for _ in range(2000):
            while self.quarantined:
                self.sequences.free_quarantined(self.quarantined.pop())
            for request in requests.in_state(State.PARKED):
                requests.enqueue(request.id)
            for handle in self.receiving():
                self.read_on(handle)
            for handle in sorted(self.leases):
                self.release(handle)
            for request in requests.in_state(State.LEASED):
                if request.id.handle not in self.leases:
                    self.sequences.free(request.id)
            for slot in self.sequences.batch.slots_in(Phase.PREFILL).tolist():
                handle = self.sequences.batch.request(slot).id.handle
                if not self.sequences.branches.of(slot):  # a group of which no choice is left
                    self.sequences.free(id_of(handle))
            if not self.step() and not requests.ids:
                return
        raise AssertionError(f"no end: {[id.handle for id in requests.ids]}")

    def run(self) -> None:
        """Runs the whole traffic; raises AssertionError where the engine is wrong."""
        for _ in range(STEPS):
            self.happen()
        self.settle()
        self.driven.assert_baseline()
        for handle, choice in self.asked.items():
            self._check_tokens(handle, choice)
        for handle, (prompt, pooling) in self.to_embed.items():
            self._check_embedding(handle, prompt, pooling)

    def _check_tokens(self, handle: int, choice: Choice) -> None:
        tokens, finish = self.driven.tokens.get(handle, []), self.driven.finish.get(handle)
        expected = tokens if choice.tokens is None else choice.tokens
        assert tokens == expected[: len(tokens)], f"tokens of {handle}"
        if handle in self.ended and not finish:
            assert len(tokens) == self.ended[handle], f"{handle} goes on after its end"
        elif choice.kind is Kind.PRODUCE:
            assert len(tokens) == 1, f"first token of {handle}"
            assert bool(finish) == (len(expected) == 1), f"end of {handle}"
        elif choice.kind is Kind.LOCAL or len(expected) > 1:
            assert finish, f"{handle} has no end"
            assert len(tokens) == len(expected) <= choice.count, f"length of {handle}"

    def _check_embedding(self, handle: int, prompt: list[int], pooling: Pooling) -> None:
        found = self.driven.embeddings.get(handle)
        if found is None:
            assert handle in self.ended or handle in [failure.handle for failure in self.driven.failures]
            return
        states = [(self.oracle.follower(prompt[: index + 1]), index) for index in range(len(prompt))]
        wanted = {Pooling.LAST: states[-1:], Pooling.CLS: states[:1], Pooling.MEAN: states}[pooling]
        assert np.allclose(found, np.mean(np.array(wanted, dtype=np.float64), axis=0)), f"embedding of {handle}"


def main() -> int:
    """Runs many seeds; prints each that fails."""
    parser = argparse.ArgumentParser(description="random traffic through an engine, with all checks after each step")
    parser.add_argument("--seeds", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first one")
    parser.add_argument("--slices", action="store_true", help="layers have windows of their own")
    arguments = parser.parse_args()
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        try:
            Traffic(seed, arguments.slices).run()
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"seed {seed} failed", flush=True)
    print(f"{arguments.seeds} seeds from {arguments.first}: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
