"""The emulated GPU shows what a GPU would only show now and then."""

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

from tests.gpu.emulated_cuda import Card, Order, Violation, emulated_cuda
from tests.machine import NO_GPU, needs

pytestmark = needs(NO_GPU)


@pytest.fixture
def late() -> Iterator[Card]:
    with emulated_cuda(Order.LATE) as card:
        yield card


@triton.jit  # type: ignore[untyped-decorator]
def increment(numbers: tl.tensor) -> None:
    tl.store(numbers, tl.load(numbers) + 1)


def pinned(value: float) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.float32, pin_memory=True)


def test_kernels_and_operations_run_in_the_order_of_their_stream(late: Card) -> None:
    numbers = torch.zeros(3, device="cuda")
    increment[(1,)](numbers)
    doubled = (numbers + numbers)[:1]
    increment[(1,)](numbers)
    assert (doubled.item(), numbers.tolist()) == (2, [2, 0, 0])
    assert late.waits == ["busy: for _local_scalar_dense", "busy: for a copy between the device and the host"]


def test_what_was_not_waited_for_is_not_there(late: Card) -> None:
    host, done = pinned(0), torch.cuda.Event()
    host.copy_(torch.ones(1, device="cuda"), non_blocking=True)
    done.record()
    assert host.item() == 0
    done.synchronize()
    assert host.item() == 1
    assert late.waits == ["busy: for an event"]
    sleeping = torch.cuda.Event(blocking=True)
    sleeping.record()
    sleeping.synchronize()
    assert late.waits == ["busy: for an event", "asleep"]


def test_a_copy_to_the_device_reads_what_is_there_then(late: Card) -> None:
    host, device = pinned(1), torch.zeros(1, device="cuda")
    device.copy_(host, non_blocking=True)
    host.fill_(2)
    assert device.item() == 2
    device.copy_(host)
    host.fill_(3)
    assert device.item() == 2


def test_an_indexed_assignment_writes_to_the_tensor_when_its_turn_has_come(late: Card) -> None:
    """Where the index is a tensor of the device; one of the host, or a mask that has to be counted, is waited for."""
    numbers, rows = torch.zeros(4, 2, device="cuda"), torch.tensor([3, 1], device="cuda")
    late.waits.clear()
    values = torch.ones(2, 2, device="cuda")
    numbers[rows] = values
    values.fill_(7)
    numbers[rows, 1] += 1
    numbers[numbers == 1] = 5
    assert late.waits == []
    assert numbers.tolist() == [[0, 0], [5, 2], [0, 0], [5, 2]]
    three = torch.arange(1, 4, dtype=torch.float32, device="cuda")
    late.waits.clear()
    numbers[[0, 2]] = 8
    numbers[torch.tensor([2]), 1:] = 9
    numbers[numbers == 8] = three
    assert late.waits == ["busy: for an indexed assignment"] * 3
    assert numbers.tolist() == [[1, 2], [5, 2], [3, 9], [5, 2]]
    with pytest.raises(Violation, match="host and of the device"):
        numbers[rows] = torch.ones(2, 2)


@pytest.mark.parametrize(("order", "found"), [(Order.LATE, 1), (Order.EARLY, 2)])
def test_streams_that_do_not_wait_for_each_other_run_in_the_worst_order(order: Order, found: int) -> None:
    with emulated_cuda(order):
        device, host, side = torch.zeros(1, device="cuda"), pinned(0), torch.cuda.Stream()
        device.fill_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            host.copy_(device, non_blocking=True)
        device.fill_(2)
        side.synchronize()
        assert host.item() == found


def test_memory_is_not_freed_before_another_stream_has_used_it() -> None:
    def use(*, record: bool) -> None:
        with emulated_cuda(Order.LATE):
            device, host, side = torch.zeros(1, device="cuda"), pinned(0), torch.cuda.Stream()
            with torch.cuda.stream(side):
                host.copy_(device, non_blocking=True)
            if record:
                device.record_stream(side)
            del device

    use(record=True)
    with pytest.raises(Violation, match="freed"):
        use(record=False)


def test_a_graph_runs_when_it_is_replayed_and_takes_the_memory_of_its_pool(late: Card) -> None:
    numbers, pool = torch.zeros(1, device="cuda"), torch.cuda.graph_pool_handle()
    graphs, outputs = [], []
    for number in (1, 2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            outputs.append(numbers + number)
    numbers.fill_(5)
    graphs[0].replay()
    assert outputs[0].item() == 6
    graphs[1].replay()
    assert (outputs[0].isnan().item(), outputs[1].item()) == (True, 7)


def test_a_graph_that_has_lost_memory_is_not_replayed(late: Card) -> None:
    numbers, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = numbers + 1
    graph.replay()
    assert kept.tolist() == [1, 1, 1, 1]
    del numbers
    with pytest.raises(Violation, match="freed"):
        graph.replay()


def test_memory_that_is_freed_is_kept_until_the_cache_is_emptied(late: Card) -> None:
    numbers = torch.zeros(1024, device="cuda")
    for _ in range(5):
        numbers = numbers + 1
    assert (torch.cuda.memory_reserved(), torch.cuda.max_memory_reserved()) == (8192, 8192)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 4096


def test_what_a_gpu_refuses_is_refused(late: Card) -> None:
    device, host = torch.zeros(2, device="cuda"), torch.zeros(2)
    assert torch.empty(1, pin_memory=True).isnan(), "as memory that nothing has written"
    with pytest.raises(Violation, match="host and of the device"):
        device.add_(host)
    with pytest.raises(Violation, match="increment: a tensor of the host"):
        increment[(1,)](host)
    with pytest.raises(TypeError, match="numpy"):
        device.numpy()
    waits = (device.cpu, torch.cuda.synchronize, lambda: device.copy_(host), lambda: torch.tensor(1, device="cuda"))
    for wait in waits:
        with pytest.raises(Violation, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            wait()
