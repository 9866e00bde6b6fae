"""The papers' mixers from a training file to rows and drawn tokens, and images with every one that sees both sides."""

from pathlib import Path

import pytest

from dist_attn.errors import InputError
from dist_attn.wire.messages import RowSpec
from papers.tests.support.tasks import small_task
from tests.training import test_every_kind as core
from tests.training.test_every_kind import PATCHES, RUN, TEXT, WINDOW, _encode, _encoder, _text_encoder

CAUSAL = {
    "performer": {"num_heads": 2, "num_random": 8},
    "efficient": {"num_heads": 2},
    "scaleformer": {"num_heads": 2, "reach": 3},
    "static_kernel": {"num_heads": 2},
    "s4d": {"state_size": 4},
    "s4": {"state_size": 4},
    "lssl": {"state_size": 4},
    "hippo": {"state_size": 5},
}
WHOLE = {
    "bidirectional-performer": {"kind": "bidirectional", "attention": "performer", "num_heads": 2},
    "bidirectional-efficient": {"kind": "bidirectional", "attention": "efficient", "num_heads": 2},
    "bidirectional-scaleformer": {"kind": "bidirectional", "attention": "scaleformer", "num_heads": 2},
    "fnet": {},
    "mlp_mixer": {"length": WINDOW, "token_mlp_size": 8},
    "sgconv": {"length": WINDOW, "piece": 4},
    "s4d-both-sides": {"kind": "s4d", "state_size": 4, "form": "convolution", "bidirectional": True},
}
core.CAUSAL.update(CAUSAL)
core.WHOLE.update(WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_kind_trains_encodes_and_generates(tmp_path: Path, name: str) -> None:
    """The loss of a run falls; the model it leaves gives one pass's rows on three ranks, and draws its tokens."""
    core.test_a_causal_kind_trains_encodes_and_generates(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", core.WHOLE)
def test_a_kind_that_sees_both_sides_trains_and_encodes(tmp_path: Path, name: str) -> None:
    """A classifier of images learns with it, and a text encoder gives the same rows on one and on three ranks."""
    assert PATCHES + 1 == WINDOW
    config = small_task("vision", tmp_path / "run", model={"encoder": _encoder(name)}, data={"batch": 20}, run=RUN)
    core.assert_trains_and_encodes(tmp_path, config, name)


@pytest.mark.parametrize("name", WHOLE)
def test_a_kind_that_sees_both_sides_does_not_generate(name: str) -> None:
    """A language model over it is refused before anything is built, and the words name the kind."""
    core.test_a_kind_that_sees_both_sides_does_not_generate(name)


def test_a_length_that_token_mixing_has_no_weights_for_is_refused(tmp_path: Path) -> None:
    """A text that does not end with a whole window says how many tokens there are and how many it takes."""
    with pytest.raises(InputError, match=f"has 5 tokens; token mixing has weights for exactly {WINDOW}: cut or pad"):
        _encode(_text_encoder("mlp_mixer"), tmp_path, RowSpec("window", WINDOW, "model"), 1, TEXT[: 2 * WINDOW + 5])
