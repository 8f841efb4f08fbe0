"""Weights that real processes share: mapped once, whole or not at all, whoever of them dies."""

import fcntl
import json
import os
import signal
import struct
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.shared_file import SharedFile, SharedFileError, open_sealed
from services.engine.kernels.routing_numbers import RoutingNumbers, Scores
from services.engine.runner.cpu import shared_weights
from services.engine.runner.cpu.shared_weights import SharedWeights, name_of, share_weights
from services.engine.runner.cpu.weight_holders import Holder, NotSharedError, WeightHolders
from services.engine.runner.cpu.weight_image import ImageError, image_bytes, weights_of
from tests.engine.sharing import SHAPE, Told, sharers

COUNT = SHAPE.numel()
SEALS = 1033, 0xF  # F_ADD_SEALS, all


def sums(number: float, calls: int = 1) -> list[float]:
    """Sums of weight, norm and counts, which each process has for itself."""
    return [COUNT * number, 4096 * number, 4.0 * calls]


def test_the_second_process_maps_what_the_first_has_packed_and_memory_holds_it_once(tmp_path: Path) -> None:
    with sharers(tmp_path, 1.0) as (first,):
        assert first.hears() == "half"
        first.tell("go on")
        assert first.hears() == (True, [])
        with sharers(tmp_path, 2.0) as (second,):
            is_own, stages = second.hears()
            assert (is_own, stages) == (False, [f"mapping the weights of process {first.process.pid}"])
            assert [first.ask("sums"), first.ask("sums")] == [sums(1.0), sums(1.0, calls=2)]
            assert second.ask("sums") == sums(1.0), "counts are each process's own"
            (rss, pss, _), (other_rss, other_pss, _) = first.ask("memory"), second.ask("memory")
            assert rss == other_rss >= COUNT * 4 // 1024
            assert pss + other_pss <= rss + 8, "both have the same pages"


def test_who_comes_while_another_packs_waits_and_says_for_whom(tmp_path: Path) -> None:
    with sharers(tmp_path, 1.0) as (first,):
        assert first.hears() == "half"
        with sharers(tmp_path, 2.0) as (second,):
            pid = first.process.pid
            _until_waiting(tmp_path, second.process.pid)
            first.tell("go on")
            assert first.hears()[0] is True
            assert second.hears() == (
                False,
                [f"waiting for weights that are packed by process {pid}", f"mapping the weights of process {pid}"],
            )
            assert second.ask("sums") == sums(1.0)


def test_nobody_maps_what_a_process_left_that_was_killed_while_it_packed(tmp_path: Path) -> None:
    with sharers(tmp_path, 1.0) as (first,):
        assert first.hears() == "half"
        with sharers(tmp_path, 2.0) as (second,):
            _until_waiting(tmp_path, second.process.pid)
            first.kill()
            assert second.hears() == "half", "it packs, since nobody has them"
            second.tell("go on")
            assert second.hears()[0] is True
            assert second.ask("sums") == sums(2.0)


def test_weights_outlive_the_process_that_packed_them_and_end_with_the_last_one(tmp_path: Path) -> None:
    with sharers(tmp_path, 1.0) as (first,):
        assert first.hears() == "half"
        first.tell("go on")
        first.hears()
        with sharers(tmp_path, 2.0) as (second,):
            assert second.hears()[0] is False
            first.kill()
            assert second.ask("sums") == sums(1.0)
            with sharers(tmp_path, 3.0) as (third,):  # as a worker that is restarted alone
                assert third.hears() == (False, [f"mapping the weights of process {second.process.pid}"])
                assert third.ask("sums") == sums(1.0)
    with sharers(tmp_path, 4.0) as (fourth,):
        assert fourth.hears() == "half", "all were killed, and their memory is gone"


def test_a_process_that_ends_takes_its_line_with_it(tmp_path: Path) -> None:
    with sharers(tmp_path, 1.0) as (first,):
        first.hears()
        first.tell("go on")
        first.hears()
        assert [path.name for path in tmp_path.iterdir()] == ["name"]
        assert tmp_path.joinpath("name").stat().st_mode & 0o777 == 0o600
        holders = WeightHolders(tmp_path)
        with holders.locked("name", patience_s=1, tell=lambda *_: None) as file:
            assert [each.pid for each in file.holders()] == [first.process.pid]
            file.add(Holder.of_this_process(0))
        holders.leave("name")
        assert tmp_path.joinpath("name").read_text().startswith(f"{first.process.pid} ")
        first.kill()
        holders.leave("name")
    assert not list(tmp_path.iterdir())


def test_shared_weights_cannot_be_written(tmp_path: Path) -> None:
    with sharers(tmp_path, 1.0) as (first,):
        first.hears()
        first.tell("go on")
        first.hears()
        first.tell("write")
        first.process.join(60)
        assert first.process.exitcode == -signal.SIGSEGV


def test_a_process_that_stands_still_is_not_waited_for(tmp_path: Path) -> None:
    with sharers(tmp_path, 1.0) as (first,):
        assert first.hears() == "half"
        assert first.process.pid is not None
        os.kill(first.process.pid, signal.SIGSTOP)
        with sharers(tmp_path, 2.0, patience_s=0.2) as (second,):
            assert second.hears() == f"process {first.process.pid} packs them, and has not come on for 0 s"


def _until_waiting(directory: Path, pid: int | None) -> None:
    """Waits until a process has opened the file of the name, which another has locked, and opens it once more."""
    path, times, was_open = str(directory / "name"), 0, False
    while times < 2:
        is_open = path in _open_files(pid)
        times += is_open and not was_open
        was_open = is_open


def _open_files(pid: int | None) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(link))
    return found


def packed(number: float) -> dict[str, torch.Tensor]:
    """Weights that are in no file yet."""
    return {"weight": torch.full((4096,), number)}


def shared(directory: Path, number: float) -> tuple[bool, float]:
    """Shares weights in this process. Returns whether it packed them, and their first number."""
    found = share_weights("name", lambda: packed(number), Told(), WeightHolders(directory))
    return found.is_own, found.weights["weight"][0].item()


def line(file: int) -> str:
    """A line of this process with this descriptor."""
    own = Holder.of_this_process(file)
    return f"{own.pid} {own.started} {own.file}\n"


def memory(content: bytes, mode: int = 0o600, *, sealed: bool = True) -> int:
    """Makes a file without a name."""
    file = os.memfd_create("baton-weights", os.MFD_ALLOW_SEALING)
    os.fchmod(file, mode)
    os.write(file, content)
    if sealed:
        fcntl.fcntl(file, *SEALS)
    return file


TAIL = "<QQ32s16s"
NAME = sha256(b"name").digest()
WHOLE = b"\0" * 64 + struct.pack(TAIL, 0, 4, NAME, b"baton's weights\n")


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\x00garbage\n\n1 2\n-1 -1 -1\n99999999999999999999999 1 1\n",
        b"1" * (1 << 20),
        f"{os.getpid()} 1 3\n".encode(),  # of a process of the same number that is gone
        b"999999999 1 3\n",
    ],
    ids=["garbage", "long", "its process is gone, the number is another's", "nobody has its number"],
)
def test_lines_that_name_nobody_are_passed_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "name").touch(mode=0o600)
    (tmp_path / "name").write_bytes(content)
    assert shared(tmp_path, 3.0) == (True, 3.0)
    assert (tmp_path / "name").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("content", "mode", "sealed", "why"),
    [
        (b"x", 0o600, True, "without an end"),
        (b"x" * 4096, 0o600, True, "has no weights"),
        (b"\0" * 64 + struct.pack(TAIL, 1 << 60, 4, NAME, WHOLE[-16:]), 0o600, True, "has no weights"),
        (WHOLE.replace(NAME, sha256(b"other").digest()), 0o600, True, "has other weights"),
        (WHOLE, 0o600, False, "not complete"),
        (WHOLE, 0o640, True, "other users"),
    ],
)
def test_files_that_are_no_complete_weights_are_not_mapped(
    tmp_path: Path, content: bytes, mode: int, sealed: bool, why: str
) -> None:
    file = memory(content, mode, sealed=sealed)
    with pytest.raises(SharedFileError, match=why):
        open_sealed(f"/proc/self/fd/{file}", "name")
    (tmp_path / "name").touch(mode=0o600)
    (tmp_path / "name").write_text(line(file))
    assert shared(tmp_path, 3.0) == (True, 3.0)
    os.close(file)


def test_a_descriptor_that_has_other_weights_by_now_is_not_mapped(tmp_path: Path) -> None:
    """A process that closes weights has its next file by the same descriptor, which the line of the first names."""

    def share(name: str, number: float) -> SharedWeights:
        return share_weights(name, lambda: packed(number), Told(), WeightHolders(tmp_path))

    def descriptor(name: str) -> str:
        return (tmp_path / name).read_text().split()[2]

    first = share("first", 1.0)
    del first
    other = share("other", 2.0)
    assert descriptor("other") == descriptor("first"), "so that the line of the first names it"
    again = share("first", 3.0)
    assert (again.is_own, again.weights["weight"][0].item()) == (True, 3.0)
    assert other.weights["weight"][0].item() == 2.0


def test_a_complete_file_whose_image_is_none_is_not_used(tmp_path: Path) -> None:
    file = memory(WHOLE)
    open_sealed(f"/proc/self/fd/{file}", "name")
    (tmp_path / "name").touch(mode=0o600)
    (tmp_path / "name").write_text(line(file))
    with pytest.raises(NotSharedError, match="cannot be read"):
        shared(tmp_path, 3.0)
    os.close(file)


def test_an_image_calls_no_code_but_the_engines(tmp_path: Path) -> None:
    with pytest.raises(NotSharedError, match="builtin_function_or_method is in them"):
        share_weights("name", lambda: {"code": os.system}, Told(), WeightHolders(tmp_path))
    memory = SharedFile()
    mapping = memory.finish(b"", "name")
    for module, name in [("os", "system"), ("services.engine.models.opt", "torch.os.system")]:
        for node in (["origin", [module, name], [], {}], ["object", module, name, {}], ["enum", module, name, "x"]):
            with pytest.raises(ImageError, match=r"is no part of weights|has no attribute"):
                weights_of(json.dumps([node]).encode(), mapping)


@pytest.mark.parametrize(
    "nodes",
    [[], [["plain"]], [["tuple", [3]]], [["tensor", "there", "float32", [2], 1 << 40, [1]]], [["?", [], 1]], {}],
)
def test_an_image_that_contradicts_itself_is_refused(nodes: object) -> None:
    memory = SharedFile()
    with pytest.raises(ImageError, match="cannot be read"):
        weights_of(json.dumps(nodes).encode(), memory.finish(b"", "name"))


def test_an_image_gives_objects_back_as_they_were() -> None:
    weight = torch.arange(2048, dtype=torch.bfloat16).view(32, 64)
    shared_twice, columns = torch.tensor([1, 2]), weight.t()
    numbers = RoutingNumbers(num_experts=4, top_k=2, scores=Scores.SOFTMAX)
    others = [shared_twice, range(1, 9, 2), numbers, None, 0.5]
    whole = {"a": (weight, columns, shared_twice), "b": others, "c": {1, 2}}
    file = SharedFile()
    image = image_bytes(whole, file)
    found = weights_of(image, file.finish(image, "name"))
    assert torch.equal(found["a"][0], weight)
    assert torch.equal(found["a"][1], columns)
    assert found["a"][2] is found["b"][0]
    assert found["a"][2].tolist() == [1, 2]
    assert found["b"][1:] == others[1:]
    assert found["c"] == {1, 2}


def test_directories_and_files_that_others_may_write_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(NotSharedError, match="other users own or may write it"):
        shared(tmp_path / "open", 3.0)
    (tmp_path / "file").mkdir(mode=0o700)
    (tmp_path / "file" / "name").touch()
    (tmp_path / "file" / "name").chmod(0o666)
    with pytest.raises(NotSharedError, match="other users own or may write it"):
        shared(tmp_path / "file", 3.0)
    (tmp_path / "link").mkdir(mode=0o700)
    (tmp_path / "link" / "name").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotSharedError):
        shared(tmp_path / "link", 3.0)
    assert not (tmp_path / "elsewhere").exists()


def test_weights_in_use_keep_their_file_from_being_sealed() -> None:
    file = SharedFile()
    weight = file.take(64)
    with pytest.raises(SharedFileError, match="still in use"):
        file.finish(b"image", "name")
    assert weight[0] == 0


def test_names_differ_where_weights_in_memory_may(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name_of("a", 1), name_of("a", 1), name_of("a", 2)]
    monkeypatch.setattr(shared_weights, "ISA", replace(ISA, name="another class of processors"))
    names.append(name_of("a", 1))
    monkeypatch.setattr(shared_weights, "code_digest", lambda: "other code")
    names.append(name_of("a", 1))
    monkeypatch.setattr(shared_weights, "host_digest", lambda: "another host")
    names.append(name_of("a", 1))
    assert names[0] == names[1]
    assert len(set(names)) == 5
