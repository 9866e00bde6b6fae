"""Ranks that take turns: each goes on from the state that the one before it has left, for one group of heads at a time.

While a rank works on its second group of heads the next one works on the first, so that with G groups P ranks are done
after G + P - 1 turns of 1 / (G P) of the work. Nothing is computed in another way than by one rank alone, so that the
bits do not depend on the number of ranks where those of `work` do not depend on cuts.
"""

from collections.abc import Callable, Sequence

import torch

from dist_attn.comm import Communicator, Pending
from dist_attn.comm import differentiable as collectives
from dist_attn.costs import MOST_TURNS, takes_turns
from dist_attn.ops.parts import connected
from dist_attn.sharded.prefix_scan.exchanges import LABEL, tied
from dist_attn.sharded.sharding import Sharding

HEADS_OF_A_GPU = 16  # of all sequences together: fewer leave most of it idle
# Of a thread's turns that the last rank waits for on a CPU, tokens times numbers of their states: some milliseconds,
# where a message takes one.
TURN_NUMBERS = 1 << 26

Work = Callable[[slice, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor]]
Absorb = Callable[[slice, torch.Tensor], torch.Tensor]
Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]
WhenThere = Callable[[Callable[[], None]], None]


def in_turn(
    comm: Communicator,
    first_BHX: torch.Tensor,
    heads_at_once: int,
    work: Work,
    join: Join = lambda outputs: outputs[0],
    *,
    absorb: Absorb | None = None,
    when_there: WhenThere | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The messages of the states before this rank's first token, the outputs, and the messages of the global last ones.

    `work` takes some heads and the message of their state before this rank's tokens, and gives their outputs, if there
    are any, and the message of their state after these. `first` is the one before the first global token; it depends on
    all inputs, so that ranks without tokens have a graph like the others. `heads_at_once` divides the heads. `join`
    puts groups' outputs side by side; by default there is one group. With `when_there`, that of a `Sharding`, nothing
    has gradients, and the last messages are filled in when what it is given is called. `absorb`, where nothing has
    gradients, gives the message of `work` sooner: the next rank begins earlier, and the first outputs are taken last.

    Every rank makes all exchanges, and whatever is used of the results, the backward pass goes through all of them.

    Cost: G + P - 2 steps, |x| bytes in G messages to the next rank; from the last, (P - 1) |x| in a broadcast. Backward
        the same the other way.
    """
    groups = [slice(at, at + heads_at_once) for at in range(0, max(1, first_BHX.shape[1]), heads_at_once)]
    befores, outputs, afters = [], [], []
    under_way: list[Pending] = []
    rows = first_BHX[None, :, :heads_at_once][:0]
    ahead = absorb if comm.rank + 1 < comm.size else None
    for turn in range(len(groups) + comm.size - 1):
        at = turn - comm.rank
        works, receives = 0 <= at < len(groups), comm.rank > 0 and 0 <= at + 1 < len(groups)
        if works:
            befores.append(rows[0] if comm.rank else first_BHX[:, groups[at]])
            if ahead is not None and at == 0:
                afters.append(ahead(groups[0], befores[0]))
            else:
                out, after = work(groups[at], befores[-1])
                outputs += [] if out is None else [out]
                afters.append(after)
        if turn + 2 == len(groups) + comm.size:
            break  # nobody takes a turn after this one
        sends = works and comm.rank + 1 < comm.size
        sent = (afters[-1] if sends else first_BHX[:, :heads_at_once])[None][: int(sends)]
        send, recv = ({comm.rank + 1: 1} if sends else {}), ({comm.rank - 1: 1} if receives else {})
        if when_there is None:
            rows = collectives.send_receive(comm, connected(sent, rows), send, recv, label=LABEL)
        else:
            under_way.append(comm.send_receive_start(sent, send, recv, label=LABEL))
            rows = under_way[-1].arrived()
    if ahead is not None and (out := work(groups[0], befores[0])[0]) is not None:
        outputs.insert(0, out)
    before_BHX, after_BHX = torch.cat(befores, dim=1), torch.cat(afters, dim=1)
    out_BHLV = join(outputs) if outputs else None
    if when_there is not None:
        return before_BHX, out_BHLV, _from_last(comm, after_BHX, under_way, when_there)
    if comm.size > 1:
        after_BHX = collectives.broadcast(comm, connected(after_BHX, rows), comm.size - 1, label=LABEL)
        out_BHLV = None if out_BHLV is None else tied(out_BHLV, after_BHX)
    return before_BHX, out_BHLV, after_BHX


def _from_last(
    comm: Communicator, x: torch.Tensor, under_way: Sequence[Pending], when_there: WhenThere
) -> torch.Tensor:
    """The last rank's x on every rank, once that is there."""
    last = comm.size - 1
    here = x if comm.rank == last else torch.full_like(x, torch.nan)
    send, recv = (dict.fromkeys(range(last), 1), {}) if comm.rank == last else ({}, {last: 1})
    pending = comm.send_receive_start(x.expand(len(send), *x.shape).contiguous(), send, recv, label=LABEL)

    def fill() -> None:
        for exchange in under_way:
            exchange.wait()
        for row in pending.wait():
            here.copy_(row)

    when_there(fill)
    return here


def threads_of(comm: Communicator) -> int:
    """The number of threads that rank 0 has on its CPU: the same on all ranks, asked for once."""
    if comm.size == 1 or comm.backend == "simulated":  # simulated ranks are threads themselves
        return 1
    return int(comm.told_by_first("threads", lambda: str(torch.get_num_threads())))


def heads_of_a_turn(
    sharding: Sharding, state: tuple[int, int, int, int], device: torch.device, *, erases: bool, always: bool = False
) -> int | None:
    """The number of heads that a rank takes in one turn, a divisor of all; None where a scan is faster.

    As many as keep its threads or its GPU busy, and so many that there are few turns, each of which waits for a
    message; where slices are short, as many as take longer than that on a CPU. `always`: turns even if they are slower.

    Shapes: `state` is that of all states, [B, H, K, V].
    """
    batch, heads, size, values = state
    busy = sharding.threads if device.type == "cpu" else HEADS_OF_A_GPU
    together = _divisor(heads, max(-(-busy // max(1, batch)), -(-heads // MOST_TURNS)))
    faster = always or takes_turns(sharding.comm.size, heads // together, erases=erases)
    if sharding.exchange.algorithm != "auto" or not faster:
        return None
    if device.type != "cpu":
        return together
    numbers = max(1, batch * max(sharding.layout.lengths) * size * values) * max(1, sharding.comm.size - 1)
    return _divisor(heads, max(together, -(-TURN_NUMBERS * sharding.threads // numbers)))


def _divisor(heads: int, least: int) -> int:
    """The smallest divisor of all heads that is not below `least`; all of them where there is none."""
    return next((n for n in range(min(least, heads), heads) if n and heads % n == 0), max(1, heads))
