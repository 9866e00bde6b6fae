"""Scaleformer in models: captured steps, stored states, recomputation, training on a mesh, sums in one order."""

from pathlib import Path

import pytest
import torch

from dist_attn_papers.mixers.scaleformer_config import ScaleformerConfig
from papers.tests.support.model_cases import PAPERS_CASES
from tests.generation import test_captured_step as captured
from tests.generation import test_state_snapshot as snapshots
from tests.models import test_fixed_order as fixed_order
from tests.models import test_hybrid as hybrid
from tests.models import test_recomputation as recomputation
from tests.rank import test_state_bytes as state_bytes
from tests.rank import test_stored_sessions as stored_sessions
from tests.support.models import small_config
from tests.training import test_mesh as mesh

KIND = "scaleformer"
CASES = [name for name in PAPERS_CASES if name.startswith("relative positions")]
SMALL = {"mixer": {"kind": KIND, "hidden_size": 16, "num_heads": 2, "reach": 5}}
captured.MIXERS[KIND] = ScaleformerConfig(kind="scaleformer", hidden_size=8, num_heads=2, reach=3)
captured.HOW[KIND] = captured.HOW["rfa_gate"]
state_bytes.KINDS[KIND] = stored_sessions.KINDS[KIND] = SMALL
recomputation.MIXERS[KIND] = {"kind": KIND, "reach": 3}
recomputation.BOTH_SIDES[KIND] = {"attention": KIND, "reach": 2}


def test_captured_steps() -> None:
    """Steps over buffers equal plain steps, and sessions that come and go draw the same tokens."""
    captured.test_steps_over_buffers_equal_plain_steps(KIND)
    captured.test_slots_draw_the_same_tokens(KIND)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_states_as_bytes(temperature: float) -> None:
    """A rank that goes on from them gives the same bits as one that never stopped; their sizes are those of a plan."""
    state_bytes.test_reading_goes_on_bit_for_bit(KIND)
    state_bytes.test_drawing_goes_on_bit_for_bit(KIND, temperature)
    state_bytes.test_what_a_rank_says_of_its_states_is_what_the_configuration_says(KIND)


def test_a_stored_state_goes_on_bit_for_bit() -> None:
    """Rows, drawn tokens and later states are those of a run without interruption."""
    stored_sessions.test_a_stored_state_goes_on_bit_for_bit(KIND)


@pytest.mark.slow
def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """A state saved by one process and restored by another: no token is read again, and logits are equal to the bit."""
    snapshots.check_a_new_process(tmp_path, CASES[:1])


def test_a_state_goes_on_over_another_number_of_ranks() -> None:
    """Ranks that read a text together have equal states, and one rank goes on from them as if it had read alone."""
    snapshots.test_a_state_goes_on_over_another_number_of_ranks(CASES[0])


def test_recomputation_changes_no_bit() -> None:
    """With a carried state, and over all tokens, loss and gradients are bitwise those without it."""
    recomputation.test_a_language_model_trains_as_without_it(KIND)
    recomputation.test_an_encoder_trains_as_without_it(KIND)


def test_every_mesh_has_the_gradients_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradients, carried state and validation over uneven shares are one rank's, in micro-batches too."""
    mixer = {"kind": KIND, "hidden_size": 16, "num_heads": 2, "reach": 3}
    monkeypatch.setattr(mesh, "small_config", lambda kind: small_config(mixer=mixer))
    monkeypatch.setattr(mesh.task, "first_model", lambda config, _: mesh.randomised(mesh.build_model(config)).train())
    mesh.test_every_mesh_has_the_gradients_of_one_rank(tmp_path, None, KIND)


def test_sums_over_positions_have_one_order() -> None:
    """A lone row of one head, and a table's row with many pairs, are summed up in one order on a GPU."""
    fixed_order.test_one_sequence_of_one_head(KIND)
    fixed_order.check_relative_positions({"attention": KIND, "reach": 3})


def test_a_layer_of_a_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside layers of other kinds it streams, steps, and is the same over ranks."""
    monkeypatch.setattr(hybrid, "KINDS", [*hybrid.KINDS[:2], {"kind": KIND, "num_heads": 2, "reach": 3}])
    monkeypatch.setattr(hybrid, "_model", lambda: hybrid_model(hybrid.KINDS))
    hybrid.test_parallel_equals_streamed_equals_stepwise()
    hybrid.test_ranks_change_nothing()
    hybrid.test_blocks_over_ranks_go_on_from_states_of_all_kinds()


def hybrid_model(kinds: list[dict[str, object]]) -> torch.nn.Module:
    """A model with a layer of each kind."""
    return hybrid.small_model(small_config(mixer=hybrid._hybrid(*kinds), num_layers=len(kinds))).double()
