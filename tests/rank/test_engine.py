"""The whole engine with a real model: controller, agent, ranks over gloo and over MPI; and one rank without either."""

import os
import signal
import sys
import time
from functools import cache

import numpy as np
import pytest
import torch

from dist_attn.generation import generate
from dist_attn.wire.messages import RowSpec, SamplingSpec
from tests.support import faulty_rank
from tests.support.closeness import assert_close
from tests.support.controller_client import ControllerClient
from tests.support.engines import running_engine
from tests.support.models import small_config, small_model, write_small_folder

pytestmark = pytest.mark.slow

TOKENS = np.random.default_rng(2).integers(0, 250, 20_000)
SAMPLING = SamplingSpec(12, temperature=0.8, top_k=50, seed=11)
SCORED = SamplingSpec(3, temperature=0.0, logprobs=0, prompt_logprobs=2)
# What a rank needs to load torch on a busy machine; its own failures are noticed by other means much sooner.
REAL = {"rank_command": (), "heartbeat_deadline_s": 10.0, "stall_limit_s": 30.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder."""
    return write_small_folder(tmp_path_factory.mktemp("models") / "small")


@cache
def model_of(kind):
    """The model that a folder of this kind holds."""
    return small_model(small_config(kind))


@cache
def mean_rows(kind, window):
    """The rows that the model itself gives."""
    with torch.inference_mode():
        h_LD = model_of(kind).encode(torch.from_numpy(TOKENS)[None])[0]
    return torch.stack([run_LD.mean(0) for run_LD in h_LD.split(window)])


@cache
def drawn(kind, start, stop, *, scored=False):
    """The tokens that the model itself draws after some of `TOKENS`."""
    return generate(model_of(kind), TOKENS[start:stop], SCORED if scored else SAMPLING)


@cache
def logprobs(kind, tokens):
    """The log-probabilities [L, V] that the model itself gives, after each of the first `TOKENS`."""
    with torch.inference_mode():
        return model_of(kind).logits(torch.from_numpy(TOKENS[:tokens])[None])[0].double().log_softmax(1)


def work_is_right(client, name, kind="rfa_gate"):
    """An encoding and two completions, side by side, give what the model alone gives."""
    for n in (0, 1):
        client.open_completion(f"{name}{n}", SAMPLING)
        client.feed(f"{name}{n}", TOKENS[n : n + 1300], timeout_s=60)
    request = client.encode(f"{name}e", TOKENS, RowSpec("window", 300), timeout_s=60)
    assert_close(torch.from_numpy(request.rows.copy()), mean_rows(kind, 300))
    for n in (0, 1):
        assert client.finish(f"{name}{n}", 60).tokens == drawn(kind, n, n + 1300)


def scores_are_right(client, name, kind="rfa_gate"):
    """The scores of a prompt, and what is drawn after it, are those of the model alone; so is a prompt of one token."""
    prompt, logprobs_LV = TOKENS[:7000], logprobs(kind, 7000)
    scored = client.complete(f"{name}s", prompt, SCORED, timeout_s=60)
    assert scored.starts == list(range(len(prompt) - 1)) and scored.tokens == drawn(kind, 0, 7000, scored=True)
    scores = torch.from_numpy(scored.rows.copy())
    wanted_L = logprobs_LV[:-1].gather(1, torch.from_numpy(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(scores[:, 0].double(), wanted_L, rtol=0, atol=1e-4)
    likely_LK = logprobs_LV[:-1].gather(1, scores[:, 1:3].long())
    torch.testing.assert_close(scores[:, 3:].double(), likely_LK, rtol=0, atol=1e-4)
    torch.testing.assert_close(likely_LK, logprobs_LV[:-1].topk(2).values, rtol=0, atol=1e-4)
    none = client.complete(f"{name}n", prompt[:900], SamplingSpec(0, prompt_logprobs=0), timeout_s=60)
    assert (none.tokens, none.finish_reason, none.starts) == ([], "length", list(range(899)))
    one = client.complete(f"{name}o", prompt[:1], SamplingSpec(0, prompt_logprobs=0), timeout_s=60)
    assert (one.tokens, one.finish_reason, one.starts) == ([], "length", [])


def uploads_are_alike(client, ranks):
    """Return whether a text that is sent at once and one that comes in pieces have the same bits."""
    text, block = TOKENS[:4000], 512 * ranks
    quick = client.encode("quick", text, RowSpec("window", 64), timeout_s=60)
    slow = client.open_encoding("slow", RowSpec("window", 64))
    for stop in range(500, len(text) + 1, 500):
        client.feed("slow", text[stop - 500 : stop], start=stop - 500, final=stop == len(text))
        whole = stop // block * block // 64
        client.wait_until(lambda whole=whole: len(slow.starts) >= whole, what="the rows of whole blocks")
        time.sleep(0.1)  # the client is slow
    client.finish("slow", 60)
    return slow.stops == quick.stops and np.array_equal(slow.rows, quick.rows)


def test_one_rank_runs_by_itself(folder):
    """It has nobody to meet, and torch stays out of controller and agent."""
    with running_engine(model=str(folder), ranks=1, **REAL, wait=False) as (handle, client, _):
        assert client.wait_ready(90).model == "small"
        work_is_right(client, "a")
        scores_are_right(client, "s")
        with open(f"/proc/{handle.process.pid}/maps") as maps:
            assert "libtorch" not in maps.read()


def test_ranks_share_the_work_of_a_hybrid(tmp_path):
    """Blocks go over three ranks and give what the model alone gives, however fast a text comes; so it is over exact
    attention, whose keys are kept.
    """
    folder = write_small_folder(tmp_path / "small", kind="hybrid")
    with running_engine(model=str(folder), ranks=3, block_tokens=1024, **REAL, wait=False) as (_, client, _):
        client.wait_ready(90)
        assert uploads_are_alike(client, 3)
        work_is_right(client, "a", "hybrid")
        scores_are_right(client, "a", "hybrid")


@pytest.mark.mpi
def test_ranks_share_the_work_and_recover_from_a_kill(folder):
    """Blocks go over all ranks; after kill -9 of one the error names it, and a fresh group does the same work."""
    fields = {**REAL, "backend": "mpi", "ranks": 2, "block_tokens": 1024}
    with running_engine(model=str(folder), **fields, wait=False) as (handle, client, _):
        status = client.wait_ready(90)
        assert uploads_are_alike(client, 2)
        work_is_right(client, "a")
        scores_are_right(client, "a")
        victim = status.ranks[1].pid
        with ControllerClient(handle.api_address) as other:
            request = other.open_encoding("open")
            other.feed("open", TOKENS[:3000], final=False)
            other.wait_until(lambda: request.starts, 30)
            os.kill(victim, signal.SIGKILL)
            other.wait_until(lambda: request.ended, 30)
            assert f"rank 1 (pid {victim}) died" in request.failed.message
        client.wait_for_status(lambda status: status.ready and status.epoch == 2, 90)
        work_is_right(client, "b")
        scores_are_right(client, "b")


def failure_of(client, name):
    """How a request has failed."""
    request = client.requests[name]
    client.wait_until(lambda: request.ended, 120, f"the end of {name}")
    return request.failed


@pytest.fixture(scope="module")
def faulty(folder):
    """A client of two ranks that raise at texts of some lengths."""
    command = (sys.executable, "-m", "tests.support.faulty_rank")
    fields = {**REAL, "rank_command": command, "exchange_deadline_s": 2.0, "losses_to_fail": 3}
    with running_engine(model=str(folder), ranks=2, **fields, wait=False) as (_, client, _):
        client.wait_ready(90)
        yield client


@pytest.fixture(scope="module")
def undisturbed(faulty):
    """The rows of a text beside which nothing is raised."""
    return faulty.encode("undisturbed", TOKENS[:5000], RowSpec("window", 300), timeout_s=60).rows


def test_what_a_text_raises_on_every_rank_ends_its_request_alone(faulty, undisturbed):
    """In the middle of a block over two ranks: the same ranks go on, and others' rows and tokens keep their bits."""
    before = faulty.status()
    faulty.open_completion("drawn", SamplingSpec(150, temperature=0.8, seed=4, logit_bias={256: -100.0}))
    faulty.feed("drawn", TOKENS[:1300], timeout_s=60)
    for n in range(3):
        faulty.open_encoding(f"bad{n}")
        faulty.feed(f"bad{n}", TOKENS[: faulty_rank.EVERYWHERE])
        faulty.open_encoding(f"good{n}", RowSpec("window", 300))
        faulty.feed(f"good{n}", TOKENS[:5000], timeout_s=60)
    for n in range(3):
        failed = failure_of(faulty, f"bad{n}")
        assert failed.code == "engine_failed" and "ValueError: a text of 777 tokens was met" in failed.message
        assert np.array_equal(faulty.finish(f"good{n}", 60).rows, undisturbed)
    assert len(faulty.finish("drawn", 60).tokens) == 150
    assert faulty.status().lost_groups == before.lost_groups
    assert [rank.pid for rank in faulty.status().ranks] == [rank.pid for rank in before.ranks]


def test_what_a_text_raises_on_one_rank_alone_mixes_nothing_up(faulty, undisturbed):
    """The other rank stands in an exchange: the group is lost once, with this request, and others keep their bits."""
    lost = faulty.status().lost_groups
    faulty.open_encoding("bad")
    faulty.feed("bad", TOKENS[: faulty_rank.ON_ONE])
    faulty.open_encoding("good", RowSpec("window", 300))
    faulty.feed("good", TOKENS[:5000], timeout_s=90)
    assert "a text of 779 tokens was met" in failure_of(faulty, "bad").message
    assert np.array_equal(faulty.finish("good", 120).rows, undisturbed)
    assert faulty.status().lost_groups == lost + 1
