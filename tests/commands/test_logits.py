"""`dist-attn logits` over any number of ranks and blocks gives what the model gives for the whole text."""

import numpy as np
import pytest
import torch

from dist_attn.comm import run_simulated
from dist_attn.commands.encode_output import row_file
from dist_attn.commands.logits import logits_here, write_logits
from dist_attn.commands.options import LogitsOptions
from dist_attn.errors import InputError
from tests.support.closeness import assert_close
from tests.support.models import small_config, small_model

TOKENS = torch.from_numpy(np.random.default_rng(3).integers(0, 250, 290))


@pytest.mark.parametrize(("ranks", "block"), [(1, 37), (3, 37), (3, 400), (4, 2)])
def test_logits_of_any_ranks_and_blocks_are_those_of_the_whole(ranks, block, tmp_path):
    """Rows lie in the order of the tokens, whoever made them, also where blocks leave ranks without any."""
    model, out = small_model(small_config("softmax")), tmp_path / "logits.npy"
    with torch.no_grad():
        wanted_LV = model.logits(TOKENS[None])[0]

    def rank_work(comm):
        if comm.rank:
            return write_logits(comm, model, TOKENS, None, block)
        with row_file(out, tmp_path / "tokens.npy") as rows:
            return write_logits(comm, model, TOKENS, rows, block)

    with torch.no_grad():
        run_simulated(rank_work, ranks)
    assert_close(torch.from_numpy(np.load(out)), wanted_LV)


@pytest.mark.parametrize("ids", [np.zeros((2, 3), np.int64), np.zeros(3), np.zeros(0, np.int64), None])
def test_tokens_that_are_no_ids_are_refused(ids, tmp_path):
    """A file that holds anything but the ids of one text is refused with what it holds."""
    tokens = tmp_path / "tokens.npy"
    tokens.write_bytes(b"text") if ids is None else np.save(tokens, ids)
    with pytest.raises(InputError, match=r"tokens\.npy"):
        logits_here(LogitsOptions(tokens=tokens, out=tmp_path / "logits.npy"))
