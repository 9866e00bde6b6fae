"""Recurrences by flash-linear-attention's names, against its own plain forms; over ranks as on one."""

from collections.abc import Callable
from importlib import import_module
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.ops.fla import chunk_delta_rule, chunk_gated_delta_rule, chunk_gla, chunk_kda, chunk_simple_gla
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.fla import fla_adapter

__all__ = ["fla_adapter"]

B, T, H, HV, K, V = 2, 70, 2, 4, 8, 6
Recurrence = Callable[..., tuple[Tensor, Tensor | None]]
CASES: dict[str, tuple[Recurrence, bool, bool]] = {  # the function, beta, a decay for each channel
    "gated_delta_rule": (chunk_gated_delta_rule, True, False),
    "kda": (chunk_kda, True, True),
    "gla": (chunk_gla, False, True),
    "simple_gla": (chunk_simple_gla, False, False),
}


def inputs(beta: bool, channels: bool, *, heads: int = H, batch: int = B) -> dict[str, Tensor]:
    """What a recurrence takes, in float32."""
    torch.manual_seed(0)
    found = {
        "q": torch.randn(batch, T, heads, K),
        "k": F.normalize(torch.randn(batch, T, heads, K), dim=-1),
        "v": torch.randn(batch, T, HV, V),
        "g": -torch.rand(batch, T, HV, *[K] * channels),
    }
    return found | ({"beta": torch.rand(batch, T, HV)} if beta else {})


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.usefixtures("fla_adapter")
def test_their_layout_and_sums(kind: str) -> None:
    """Outputs and the state after are those of their own plain forms, from a state before."""
    function, beta, channels = CASES[kind]
    given, before = inputs(beta, channels, heads=HV), torch.randn(B, HV, K, V)
    form = "chunk" if kind == "simple_gla" else "recurrent"
    plain = getattr(import_module(f"fla.ops.{kind}.naive"), f"naive_{form}_{kind}")
    renamed = {"gk" if kind == "gla" and name == "g" else name: x for name, x in given.items()}
    want, want_state = plain(**renamed, initial_state=before, output_final_state=True)
    got, state = function(**given, initial_state=before, output_final_state=True)
    assert state is not None and want_state is not None
    assert_close(got, want)
    assert_close(state, want_state, kind="state")


@pytest.mark.parametrize("kind", CASES)
def test_fewer_key_heads_packed_sequences_and_ranks(kind: str) -> None:
    """A key head serves several value heads; sequences in one row, with states, and slices on ranks give the same."""
    function, beta, channels = CASES[kind]
    given = inputs(beta, channels, batch=1)
    wide = given | {name: given[name].repeat_interleave(HV // H, dim=2) for name in "qk"}
    assert_close(function(**given)[0], function(**wide)[0], kind="exact")

    edges, before = [0, 30, 30 + 33, T], torch.randn(3, HV, K, V)
    parts = [
        function(**{n: x[:, a:b] for n, x in given.items()}, initial_state=before[at : at + 1], output_final_state=True)
        for at, (a, b) in enumerate(pairwise(edges))
    ]
    packed = {"cu_seqlens": torch.tensor(edges)}
    out, state = function(**given, **packed, initial_state=before, output_final_state=True)
    assert_close(out, torch.cat([o for o, _ in parts], dim=1))
    assert_close(state, torch.cat([s for _, s in parts if s is not None]), kind="state")
    alone = [function(**{n: x[:, a:b] for n, x in given.items()})[0] for a, b in pairwise(edges)]
    assert_close(function(**given, **packed)[0], torch.cat(alone, dim=1))

    layout = SequenceLayout.from_lengths([20, 0, 50])
    want, want_state = function(**given, initial_state=before[:1], output_final_state=True)

    def on_rank(comm: Communicator) -> tuple[Tensor, Tensor | None]:
        part = {n: x[:, slice(*layout.range(comm.rank))] for n, x in given.items()}
        ops = ShardedSequenceOps(comm, layout)
        return function(**part, initial_state=before[:1], output_final_state=True, ops=ops)

    ranks = run_simulated(on_rank, layout.size)
    assert_close(torch.cat([o for o, _ in ranks], dim=1), want)
    assert all(torch.allclose(s, want_state, atol=1e-5) for _, s in ranks)


def test_without_decay_and_of_unit_length() -> None:
    """The delta rule is the gated one with decays of 1; lengths may be taken out here, and queries scaled."""
    given = inputs(True, False)
    del given["g"]
    want = chunk_gated_delta_rule(**given, g=torch.zeros(B, T, HV))[0]
    assert_close(chunk_delta_rule(**given)[0], want, kind="exact")
    unit = given | {name: F.normalize(given[name], dim=-1) for name in "qk"}
    long = given | {name: 7 * given[name] for name in "qk"}
    assert_close(chunk_delta_rule(**long, use_qk_l2norm_in_kernel=True)[0], chunk_delta_rule(**unit)[0])
    assert_close(chunk_delta_rule(**given, scale=1.0)[0], K**0.5 * want)


def test_another_layout_is_refused() -> None:
    """Heads before tokens are told where shapes tell, with what is needed; packed rows over ranks too."""
    given = inputs(True, False)
    with pytest.raises(ShapeError, match="tokens come before heads"):
        chunk_gated_delta_rule(**given | {"q": given["q"].transpose(1, 2)})
    with pytest.raises(ShapeError, match="tokens come before heads"):
        chunk_gated_delta_rule(**given | {name: given[name].transpose(1, 2) for name in "qkv"})
    with pytest.raises(ShapeError, match="packed is one row"):
        chunk_gated_delta_rule(**given, cu_seqlens=torch.tensor([0, T]), ops=LocalSequenceOps())

    def on_rank(comm: Communicator) -> None:
        ops = ShardedSequenceOps(comm, SequenceLayout.even(T, 1))
        with pytest.raises(InputError, match="give their layout the documents"):
            chunk_gated_delta_rule(**given, cu_seqlens=torch.tensor([0, T]), ops=ops)

    run_simulated(on_rank, 1)
