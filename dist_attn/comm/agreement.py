"""What ranks compare: how two values differ, in words, and the name of the host that a rank counts itself to.

Of two values the first entry of the first field that is not the same is named.

A value is words `name=entry,entry,…`, as a layout describes itself; any other text is a field without entries.
"""

import socket
from collections.abc import Mapping, Sequence
from itertools import zip_longest

RANKS_NAMED = 4
WORD_LENGTH = 80


def differences(values: Sequence[str]) -> str:
    """Which ranks differ from rank 0, and how each of the first few of them does; empty where all are equal."""
    ranks = [rank for rank, value in enumerate(values) if value != values[0]]
    parts = [difference(values[0], values[rank], rank) for rank in ranks[:RANKS_NAMED]]
    return "; ".join(parts) + ("; …" if len(ranks) > RANKS_NAMED else "")


def difference(zero: str, other: str, rank: int) -> str:
    """The first difference between the value of rank 0 and the one of another rank."""
    for ours, theirs in zip_longest(zero.split(" "), other.split(" "), fillvalue=""):
        if ours == theirs:
            continue
        name, _, entries = ours.partition("=")
        other_name, _, other_entries = theirs.partition("=")
        if name != other_name or not entries or not other_entries:
            break
        first, second = entries.split(","), other_entries.split(",")
        if len(first) == len(second) == 1:
            return f"{name} is {_short(entries)} on rank 0 and {_short(other_entries)} on rank {rank}"
        at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if at is None:
            return (
                f"{name} has {len(first)} entries on rank 0 and {len(second)} on rank {rank}, equal as far as both go"
            )
        counts = "" if len(first) == len(second) else f" (of {len(first)} and {len(second)} entries)"
        return f"{name}[{at}] is {_short(first[at])} on rank 0 and {_short(second[at])} on rank {rank}{counts}"
    return f"rank 0 has {_short(zero)!r} and rank {rank} has {_short(other)!r}"


def _short(text: str) -> str:
    return text if len(text) <= WORD_LENGTH else f"{text[:WORD_LENGTH]}…"


def host_name(environ: Mapping[str, str]) -> str:
    """Equal for two ranks exactly when one agent (torchrun's, or the engine's) or, without any, one machine runs both.

    Two agents on one machine are two hosts: whoever starts them so wants to try that out.
    """
    return f"{socket.gethostname()} {environ.get('GROUP_RANK', '')}"
