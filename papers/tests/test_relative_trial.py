"""Trials of relative attention's kernels: which calls begin one, what it finds, and what calls take by it."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from dist_attn.comm import Communicator
from dist_attn.ops import trial
from dist_attn.ops.linear_attention.implementation import why_not_by_default
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.ops.relative_attention import (
    RelativeCall,
    choose_relative,
    relative_attention,
    relative_attention_streaming,
    sharded,
)
from dist_attn_papers.ops.relative_attention.trial import RelativeKind, compared
from tests.ops.test_gpu_record import H100 as RECORDED
from tests.ops.test_gpu_record import RAN
from tests.ops.test_trial import (
    H100,
    LAYOUT,
    PACKED,
    SIZE,
    alone,
    begun,
    check_ranks_try_first,
    check_streams,
    interpreter,
)

__all__ = ["alone", "begun", "interpreter"]


def call_of(device: torch.device | str, **fields) -> RelativeCall:
    """A call of relative attention with k = 3."""
    q, k, v = (torch.zeros(1, 2, 3, SIZE, device=device) for _ in range(3))
    return replace(RelativeCall(q, k, v, torch.zeros(2, 7, SIZE, device=device)), **fields)


def test_each_form_is_tried_once(begun: list[str]) -> None:
    """Masked, as a stream and over all keys kernels are tried apart from each other."""
    for form in ("causal", "stream", "full", "causal"):
        assert choose_relative(call_of("cuda"), form=form).implementation == "triton"
    assert len(begun) == len(set(begun)) == 3


def test_what_a_trial_finds_wrong_streams() -> None:
    """It is said once, with what was found, and calls of the kind take the streaming form from then on."""
    with H100.entered(outcome="a state is wrong"):
        check_streams(lambda: choose_relative(call_of("cuda")))


def test_a_wrong_case_of_another_operation_does_not_count() -> None:
    """Where linear attention is known to be wrong, kernels of relative attention are tried."""
    wrong = replace(RAN, triton="3.7.1", kernels={"linear step": "errors of 2"})
    with RECORDED.entered(record=wrong):
        assert choose_relative(call_of("cuda")).implementation == "triton"
    wrong = replace(wrong, kernels={"relative full": "errors of 2"})
    with RECORDED.entered(record=wrong):
        choice = choose_relative(call_of("cuda"))
    assert choice.implementation == "streaming"
    assert "did not come out right on a GPU (relative full: errors of 2)" in choice.reason


def test_nothing_is_tried_in_a_capture(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that came up in a capture may be tried later."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert "before a CUDA graph was captured" in choose_relative(call_of("cuda")).reason
    assert choose_relative(call_of("cuda")).implementation == "triton"
    assert len(begun) == 1


def test_ranks_try_all_that_their_parts_take(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank begins the trial of the stream that it goes on with."""
    calls: list[list[trial.Attempt]] = []
    monkeypatch.setattr(sharded, "try_together", lambda comm, attempts: calls.append(attempts))
    sharded.try_relative(None, call_of("cuda"), "stream")
    assert [one.why_not() for attempts in calls for one in attempts] == [None]
    assert [one.kind.words for attempts in calls for one in attempts] == begun


def test_ranks_try_before_they_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks try kernels of streams and of packed documents, those without tokens too."""

    def works(comm: Communicator, x: torch.Tensor) -> list[Callable[[], object]]:
        rp = torch.ones(2, 5, SIZE)
        return [
            lambda: relative_attention_streaming(x, x, x, rp, ops=ShardedSequenceOps(comm, LAYOUT)),
            lambda: relative_attention(x, x, x, rp, causal=True, ops=ShardedSequenceOps(comm, PACKED)),
        ]

    check_ranks_try_first({sharded: "try_relative"}, works, monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("form", ["causal", "full", "stream"])
def test_trials_find_the_kernels_right(form: str) -> None:
    """Masked, not masked, and as a stream that goes on from a state."""
    kind = RelativeKind.of(call_of("cuda" if torch.cuda.is_available() else "cpu"), form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the interpreter's, of numbers that a mask drops
        assert why_not_by_default("relative", kind, partial(compared, kind)) is None
