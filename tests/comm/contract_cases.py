"""What every communicator promises, as functions that run on each rank; each rank knows what all ranks bring."""

import warnings
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from torch import Tensor

from dist_attn.comm import Communicator, Event, differentiable
from dist_attn.errors import CommError, InputError, MismatchError, ShapeError
from tests.comm.brought import (
    affine,
    after,
    brought,
    everyone,
    exchanged,
    ordered_sum,
    pass_counts,
    passed_on,
    passed_rows,
    rows_of,
    sends_of,
)
from tests.support.closeness import assert_close

Case = Callable[[Communicator], None]

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def gathers_every_dtype(comm: Communicator) -> None:
    """Numbers of any dtype arrive bit for bit, in order of rank."""
    for dtype in DTYPES:
        got = comm.all_gather(brought(comm.rank, 3, 2, dtype=dtype))
        assert_close(got, everyone(comm, 3, 2, dtype=dtype), kind="exact", what=str(dtype))


def gathers_odd_shapes(comm: Communicator) -> None:
    """Scalars, tensors without elements, transposed and conjugated tensors are gathered by value."""
    assert_close(comm.all_gather(brought(comm.rank)), everyone(comm), kind="exact")
    assert comm.all_gather(torch.empty(3, 0, 2)).shape == (comm.size, 3, 0, 2)
    assert_close(comm.all_gather(brought(comm.rank, 3, 4).T), everyone(comm, 3, 4).mT, kind="exact")
    z = brought(comm.rank, 5, dtype=torch.complex64)
    assert_close(comm.all_gather(z.conj()), everyone(comm, 5, dtype=torch.complex64).conj().resolve_conj())
    one_of_many = brought(comm.rank, 4, 3)[:1, 1:2]  # one element, and the next one in memory is not its neighbour
    assert_close(comm.all_gather(one_of_many.expand(1, 1).mT[..., ::2]), everyone(comm, 4, 3)[:, :1, 1:2], kind="exact")


def gathers_while_working(comm: Communicator) -> None:
    """Several gathers may be under way, be waited for in any order and more than once."""
    first = comm.all_gather_start(brought(comm.rank, 4))
    second = comm.all_gather_start(brought(comm.rank, 2, 3))
    assert_close(second.wait(), everyone(comm, 2, 3), kind="exact")
    assert_close(first.wait(), everyone(comm, 4), kind="exact")
    assert second.wait() is second.wait()


def reduces_in_order(comm: Communicator) -> None:
    """Sums are taken from rank 0 upwards, bit for bit, for small and large tensors alike."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64):
        for shape in ((), (3, 2), (0, 5), (101, 331)):
            got = comm.all_reduce_sum(brought(comm.rank, *shape, dtype=dtype))
            assert_close(got, ordered_sum(everyone(comm, *shape, dtype=dtype)), kind="exact", what=f"{dtype} {shape}")


def reduce_scatters_in_order(comm: Communicator) -> None:
    """Each rank gets the sum of what the ranks brought for it, bit for bit."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int32):
        for shape in ((), (3, 2), (0,)):
            got = comm.reduce_scatter_sum(brought(comm.rank, comm.size, *shape, dtype=dtype))
            want = ordered_sum(everyone(comm, comm.size, *shape, dtype=dtype))[comm.rank]
            assert_close(got, want, kind="exact", what=f"{dtype} {shape}")


def exchanges_uneven_rows(comm: Communicator) -> None:
    """Rows go to the rank they were counted for, in order of sender, with uneven and empty parts."""
    for dtype in DTYPES:
        for shape in ((), (2,), (2, 3)):
            rows, receive = rows_of(comm, *shape, dtype=dtype)
            got = comm.all_to_all(rows[comm.rank], sends_of(comm), receive)
            assert_close(got, exchanged(rows, comm.rank), kind="exact", what=f"{dtype} {shape}")


def exchanges_nothing(comm: Communicator) -> None:
    """Nobody sends anything, rows have no elements, or one rank sends everything: all are exchanges."""
    none = [0] * comm.size
    assert comm.all_to_all(torch.empty(0, 4), none, none).shape == (0, 4)
    rows, receive = rows_of(comm, 0)
    assert comm.all_to_all(rows[comm.rank], sends_of(comm), receive).shape == (sum(receive), 0)
    last = comm.size - 1
    send = [2] * comm.size if comm.rank == last else none
    receive = [2 if rank == last else 0 for rank in range(comm.size)]
    x = brought(comm.rank, sum(send), 3)
    want = brought(last, 2 * comm.size, 3)[2 * comm.rank : 2 * comm.rank + 2]
    assert_close(comm.all_to_all(x, send, receive), want, kind="exact")


def passes_rows_between_some(comm: Communicator) -> None:
    """Rows go from some ranks to some, in order of sender, also where a rank has no part or rows no elements."""
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        rows = passed_rows(comm.size, 2, dtype=dtype)
        got = comm.send_receive(rows[comm.rank], *pass_counts(comm))
        assert_close(got, passed_on(rows, comm.rank), kind="exact", what=str(dtype))
    assert comm.send_receive(torch.empty(0, 3), {}, {}).shape == (0, 3)
    send, recv = pass_counts(comm)
    got = comm.send_receive(torch.empty(sum(send.values()), 0), send, recv)
    assert got.shape == (sum(recv.values()), 0)


def exchanges_while_working(comm: Communicator) -> None:
    """Reductions and sparse steps may be under way together and be waited for in any order and more than once.

    A check of them raises nothing where nothing failed, on some ranks only and with waits to come.
    """
    sparse = passed_rows(comm.size, 3)
    scattered = comm.reduce_scatter_sum_start(brought(comm.rank, comm.size, 3))
    second = comm.send_receive_start(sparse[comm.rank], *pass_counts(comm))
    third = comm.send_receive_start(-sparse[comm.rank], *pass_counts(comm))
    if comm.rank == 0:
        comm.check_exchanges()
    assert_close(third.wait(), -passed_on(sparse, comm.rank), kind="exact")
    assert_close(second.wait(), passed_on(sparse, comm.rank), kind="exact")
    assert_close(scattered.wait(), ordered_sum(everyone(comm, comm.size, 3))[comm.rank], kind="exact")
    assert second.wait() is second.wait()
    comm.check_exchanges()


def broadcasts_from_each(comm: Communicator) -> None:
    """Every rank gets the source's numbers, whoever the source is."""
    for source in range(comm.size):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            got = comm.broadcast(brought(comm.rank, 2, 3, dtype=dtype), source)
            assert_close(got, brought(source, 2, 3, dtype=dtype), kind="exact")
        assert comm.broadcast(torch.empty(0, 2), source).shape == (0, 2)


def scans_in_order_of_rank(comm: Communicator) -> None:
    """Every rank gets what those before it brought, combined in order of rank by an operator that does not commute."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        maps = [affine(rank, dtype) for rank in range(comm.size)]
        for reverse in (False, True):
            before = maps[comm.rank + 1 :][::-1] if reverse else maps[: comm.rank]
            want = reduce(after, before, torch.zeros(2, 3, dtype=dtype))
            got = comm.exclusive_scan_start(maps[comm.rank], after, reverse=reverse).wait()
            assert_close(got, want, kind="exact", what=f"{dtype} {reverse}")
    assert comm.exclusive_scan_start(torch.empty(0, 2), after).wait().shape == (0, 2)


def scans_while_working(comm: Communicator) -> None:
    """Scans both ways and other exchanges may be under way together; their bytes are those of the formula."""
    maps = [affine(rank, torch.float64) for rank in range(comm.size)]
    comm.traffic.clear()
    ahead = comm.exclusive_scan_start(maps[comm.rank], after, label="carry")
    gathered = comm.all_gather_start(maps[comm.rank])
    back = comm.exclusive_scan_start(maps[comm.rank], after, reverse=True)
    assert_close(gathered.wait(), torch.stack(maps), kind="exact")
    nothing = torch.zeros(2, 3, dtype=torch.float64)
    assert_close(ahead.wait(), reduce(after, maps[: comm.rank], nothing), kind="exact")
    assert_close(back.wait(), reduce(after, maps[: comm.rank : -1], nothing), kind="exact")
    assert ahead.wait() is ahead.wait()
    sent, received = (48 * (comm.rank != end) for end in (comm.size - 1, 0))
    assert comm.traffic.events[0] == Event("exclusive_scan", "launch", sent, received, "carry")
    assert (comm.traffic.events[2].bytes_sent, comm.traffic.events[2].bytes_received) == (received, sent)
    assert comm.traffic.messages == (comm.rank != comm.size - 1) + comm.size - 1 + (comm.rank != 0)


def results_are_own_memory(comm: Communicator) -> None:
    """A result may be changed without changing the input or what another rank holds."""
    x = brought(comm.rank, 2)
    even = [2] + [0] * (comm.size - 1)
    receive = [2] * comm.size if comm.rank == 0 else [0] * comm.size
    results = [
        comm.all_gather(x),
        comm.all_reduce_sum(x),
        comm.broadcast(x, 0),
        comm.all_to_all(x, even, receive),
        comm.reduce_scatter_sum(x[:1].expand(comm.size)),
    ]
    for result in results:
        result.fill_(-1.0)
    comm.barrier()
    assert_close(x, brought(comm.rank, 2), kind="exact")
    assert_close(comm.all_gather(x), everyone(comm, 2), kind="exact")


def agrees_or_says_who_differs(comm: Communicator) -> None:
    """A value that differs between ranks is a MismatchError on all of them, and the group goes on."""
    comm.require_equal("layout", "same")
    if comm.size > 1:
        with pytest.raises(MismatchError, match="layout of rank 0 and of rank 1 differ: rank 0 has 'same' and rank 1"):
            comm.require_equal("layout", "same" if comm.rank != 1 else "other")
    comm.require_equal("layout", "same again")


def hears_what_the_first_rank_says(comm: Communicator) -> None:
    """Every rank learns rank 0's value, which is looked up there once, empty and long ones too."""
    asked = []

    def value() -> str:
        asked.append(comm.rank)
        return f"ä{comm.rank}" * 1000

    for _ in range(2):
        assert comm.told_by_first("what", value) == "ä0" * 1000
    assert comm.told_by_first("nothing", str) == ""
    assert asked == [0] * (comm.rank == 0)


def knows_its_hosts(comm: Communicator) -> None:
    """Ranks of one machine are on one host, found out in one exchange."""
    comm.traffic.clear()
    for _ in range(2):
        assert comm.hosts() == (tuple(range(comm.size)),)
    assert comm.traffic.calls == 1


def refuses_bad_arguments(comm: Communicator) -> None:
    """Arguments that do not fit are refused before anything is sent, so the group goes on."""
    x, zeros = brought(comm.rank, 3), [0] * (comm.size - 1)
    for send, receive in (([3], [3, *zeros, 0]), ([2, *zeros], [2, *zeros]), ([4, *zeros], [4, *zeros])):
        with pytest.raises(ShapeError):
            comm.all_to_all(x, send, receive)
    with pytest.raises(ShapeError):
        comm.all_to_all(x, [-1, *zeros], [-1, *zeros])
    with pytest.raises(ShapeError):
        comm.all_to_all(x.sum(), [1, *zeros], [1, *zeros])
    with pytest.raises(ShapeError, match="which is this one"):
        comm.send_receive(x, {comm.rank: 3}, {})
    with pytest.raises(ShapeError, match="add up to 0 rows"):
        comm.send_receive(x, {}, {})
    with pytest.raises(ShapeError, match="one row per rank"):
        comm.reduce_scatter_sum(brought(comm.rank, comm.size + 1))
    with pytest.raises(ShapeError, match="bool"):
        comm.all_reduce_sum(torch.ones(2, dtype=torch.bool))
    with pytest.raises(InputError, match="ranks are 0 to"):
        comm.broadcast(x, comm.size)
    comm.barrier()


def refuses_to_lose_gradients(comm: Communicator) -> None:
    """A tensor that requires a gradient is refused, unless gradients are off."""
    x = brought(comm.rank, 3).requires_grad_(True)
    with pytest.raises(InputError, match="differentiable"):
        comm.all_gather(x)
    with torch.no_grad():
        assert not comm.all_gather(x).requires_grad


def counts_bytes_by_formula(comm: Communicator) -> None:
    """Bytes and messages are those of the documented formulas."""
    others, x = comm.size - 1, brought(comm.rank, 4, 3, dtype=torch.float32)
    large = brought(comm.rank, 1000, comm.size, 8, dtype=torch.float32)
    rows, receive = rows_of(comm, 5)
    send = sends_of(comm)
    apart = [rank for rank in range(comm.size) if rank != comm.rank]
    steps: list[tuple[Callable[[], object], int, int, int]] = [
        (lambda: comm.all_gather(x), 48 * others, 48 * others, others),
        (lambda: comm.all_reduce_sum(x), 48 * others, 48 * others, others),
        (lambda: comm.reduce_scatter_sum(brought(0, comm.size, 6)), 48 * others, 48 * others, others),
        (lambda: comm.broadcast(x, 0), 48 * others * (comm.rank == 0), 48 * (comm.rank > 0), others * (comm.rank == 0)),
        (lambda: comm.barrier(), 0, 0, others),
        (
            lambda: comm.all_to_all(rows[comm.rank], send, receive),
            sum(40 * send[rank] for rank in apart),
            sum(40 * receive[rank] for rank in apart),
            sum(send[rank] > 0 for rank in apart),
        ),
    ]
    sparse = passed_rows(comm.size, 5)[comm.rank]
    to, of = pass_counts(comm)
    partners = sum(n > 0 for n in to.values())
    steps.append((lambda: comm.send_receive(sparse, to, of), 40 * sum(to.values()), 40 * sum(of.values()), partners))
    if comm.size > 2:
        steps.append((lambda: comm.all_reduce_sum(large), 64000 * others, 64000 * others, 2 * others))
    for step, sent, received, messages in steps:
        comm.traffic.clear()
        step()
        got = (comm.traffic.bytes_sent, comm.traffic.bytes_received, comm.traffic.messages, comm.traffic.calls)
        assert got == (sent, received, messages, 1), comm.traffic.events


def logs_calls_in_order(comm: Communicator) -> None:
    """The log shows that local work lies between a launch and its wait."""
    comm.traffic.clear()
    pending = comm.all_gather_start(torch.zeros(2), label="carry")
    comm.traffic.mark("local outputs")
    pending.wait()
    pending.wait()
    comm.barrier()
    assert comm.traffic.order() == ["carry launch", "local outputs mark", "carry wait", "barrier call"]
    moved = 8 * (comm.size - 1)
    assert comm.traffic.events[0] == Event("all_gather", "launch", moved, moved, "carry")


def measures_exposed_time(comm: Communicator) -> None:
    """Time in calls, launches and waits adds up to the exposed time; time spent computing in between does not."""
    comm.traffic.clear()
    assert comm.traffic.exposed_s == 0
    pending = comm.send_receive_start(torch.zeros(0), {}, {})
    pending.wait()
    comm.barrier()
    times = [event.seconds for event in comm.traffic.events]
    assert [event.phase for event in comm.traffic.events] == ["launch", "wait", "call"]
    assert min(times) > 0
    assert comm.traffic.exposed_s == pytest.approx(sum(times))


def differentiates_each_exchange(comm: Communicator) -> None:
    """Gradients of every exchange are those of the same computation on one rank, the loss being the ranks' sum."""
    size = comm.size
    rows, receive = rows_of(comm, 2)
    whole = [brought(rank, size, 3) for rank in range(size)]
    sparse = passed_rows(size, 2)
    last = size - 1
    exchanges: list[tuple[str, list[Tensor], Callable[[Tensor], Tensor], Callable[[list[Tensor], int], Tensor]]] = [
        ("all_gather", whole, lambda x: differentiable.all_gather(comm, x), lambda xs, _: torch.stack(xs)),
        ("all_reduce", whole, lambda x: differentiable.all_reduce_sum(comm, x), lambda xs, _: torch.stack(xs).sum(0)),
        (
            "reduce_scatter",
            whole,
            lambda x: differentiable.reduce_scatter_sum(comm, x),
            lambda xs, rank: torch.stack(xs).sum(0)[rank],
        ),
        ("broadcast", whole, lambda x: differentiable.broadcast(comm, x, last), lambda xs, _: xs[last] + 0 * sum(xs)),
        (
            "all_gather_start",
            whole,
            lambda x: differentiable.all_gather_start(comm, x).wait(),
            lambda xs, _: torch.stack(xs),
        ),
        (
            "send_receive_start",
            sparse,
            lambda x: differentiable.send_receive_start(comm, x, *pass_counts(comm)).wait(),
            passed_on,
        ),
        ("send_receive", sparse, lambda x: differentiable.send_receive(comm, x, *pass_counts(comm)), passed_on),
        ("all_to_all", rows, lambda x: differentiable.all_to_all(comm, x, sends_of(comm), receive), exchanged),
    ]
    for name, inputs, sharded, single in exchanges:
        xs = [x.clone().requires_grad_(True) for x in inputs]
        outputs = [single(xs, rank) for rank in range(size)]
        weights = [brought(50 + rank, *output.shape) for rank, output in enumerate(outputs)]
        loss = torch.stack([(w * y.sin()).sum() for w, y in zip(weights, outputs, strict=True)]).sum()
        wants = torch.autograd.grad(loss, xs, create_graph=True)
        norms = torch.stack([(want**2).sum() for want in wants]).sum()
        second = torch.autograd.grad(norms, xs)

        mine = inputs[comm.rank].clone().requires_grad_(True)
        got = sharded(mine)
        assert_close(got, outputs[comm.rank], kind="output", what=name)
        (grad,) = torch.autograd.grad((weights[comm.rank] * got.sin()).sum(), mine, create_graph=True)
        assert_close(grad, wants[comm.rank], kind="gradient", what=f"{name} gradient")
        (twice,) = torch.autograd.grad((grad**2).sum(), mine)
        assert_close(twice, second[comm.rank], kind="gradient", what=f"{name} second gradient")


def works_between_launch_and_wait(comm: Communicator) -> None:
    """Local work between the launch and the wait of an exchange with gradients lies there backward too."""
    x = brought(comm.rank, 3).requires_grad_(True)
    comm.traffic.clear()
    launched = differentiable.all_gather_start(comm, x, label="carry")
    local = differentiable.marked(comm, x, "local")
    (launched.wait().sum() + local.sum()).backward()
    assert comm.traffic.order() == [
        "carry with gradient launch",
        "local mark",
        "carry with gradient wait",
        "carry backward launch",
        "local backward mark",
        "carry backward wait",
    ]
    assert x.grad is not None
    assert_close(x.grad, torch.full_like(x, 1.0 + comm.size))


def differentiates_on_empty_ranks(comm: Communicator) -> None:
    """A rank with no rows and a masked loss still takes part, forward and backward."""
    busy = comm.size - 1
    counts = [[2 if sender == busy else 0 for _ in range(comm.size)] for sender in range(comm.size)]
    x = brought(comm.rank, sum(counts[comm.rank]), 3).requires_grad_(True)
    got = differentiable.all_to_all(
        comm, x, counts[comm.rank], [counts[sender][comm.rank] for sender in range(comm.size)]
    )
    total = differentiable.all_reduce_sum(comm, got.sum())
    mask = float(comm.rank == 0)
    (grad,) = torch.autograd.grad(mask * total, x)
    assert_close(grad, torch.ones_like(x), kind="gradient")


def differentiates_in_any_precision(comm: Communicator) -> None:
    """Gradients keep the dtype of their tensors, bfloat16 included."""
    x = brought(comm.rank, comm.size, 2, dtype=torch.bfloat16).requires_grad_(True)
    differentiable.reduce_scatter_sum(comm, x).float().sum().backward()
    assert x.grad is not None
    assert_close(x.grad, torch.ones_like(x), kind="exact")


def stays_out_of_graphs_without_gradients(comm: Communicator) -> None:
    """Without gradients the differentiable exchanges are the plain ones."""
    with torch.no_grad():
        got = differentiable.all_gather(comm, brought(comm.rank, 2).requires_grad_(True))
    assert not got.requires_grad
    plain = differentiable.all_gather(comm, brought(comm.rank, 2))
    assert not plain.requires_grad
    assert_close(plain, everyone(comm, 2), kind="exact")


def splits_into_groups(comm: Communicator) -> None:
    """Ranks of one colour become a group in their order, with gradients; the whole group goes on beside it."""
    for colours in ([rank % 2 for rank in range(comm.size)], [7] * comm.size, list(range(comm.size))):
        with comm.split(colours[comm.rank]) as part:
            members = [rank for rank in range(comm.size) if colours[rank] == colours[comm.rank]]
            assert (part.size, part.rank) == (len(members), members.index(comm.rank))
            own = part.all_gather(torch.tensor(comm.rank))
            assert own.tolist() == members
            assert comm.all_gather(torch.tensor(comm.rank)).tolist() == list(range(comm.size))
            x = brought(comm.rank, 3).requires_grad_(True)
            differentiable.all_reduce_sum(part, x).sum().backward()
            assert x.grad is not None
            assert_close(x.grad, torch.full_like(x, float(part.size)))
            assert part.traffic.calls == 3
            with pytest.raises(InputError, match="only the group of all ranks can be split"):
                part.split(0)
        if comm.backend != "local":
            with pytest.raises(CommError, match="after it closed"):
                part.barrier()


def warns_of_nothing(comm: Communicator) -> None:
    """No exchange uses what its library wants to be rid of."""
    x = brought(comm.rank, comm.size, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comm.all_gather(x)
        comm.all_reduce_sum(torch.ones(40_000, dtype=torch.float64))
        comm.reduce_scatter_sum(x)
        comm.all_to_all(x, [1] * comm.size, [1] * comm.size)
        comm.send_receive(passed_rows(comm.size)[comm.rank], *pass_counts(comm))
        comm.broadcast(x, 0)
        comm.barrier()


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        gathers_every_dtype,
        gathers_odd_shapes,
        gathers_while_working,
        reduces_in_order,
        reduce_scatters_in_order,
        exchanges_uneven_rows,
        exchanges_nothing,
        passes_rows_between_some,
        exchanges_while_working,
        broadcasts_from_each,
        scans_in_order_of_rank,
        scans_while_working,
        results_are_own_memory,
        agrees_or_says_who_differs,
        hears_what_the_first_rank_says,
        knows_its_hosts,
        refuses_bad_arguments,
        refuses_to_lose_gradients,
        counts_bytes_by_formula,
        logs_calls_in_order,
        measures_exposed_time,
        differentiates_each_exchange,
        works_between_launch_and_wait,
        differentiates_on_empty_ranks,
        differentiates_in_any_precision,
        stays_out_of_graphs_without_gradients,
        splits_into_groups,
        warns_of_nothing,
    )
}


def closes_for_good(comm: Communicator) -> None:
    """After `close`, which may be called twice, an exchange is an error and not a hang."""
    comm.barrier()
    comm.close()
    comm.close()
    with pytest.raises(CommError, match="after it closed"):
        comm.barrier()
