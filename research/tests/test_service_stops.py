"""Ranks that are stopped: the measurement sees each of them noticed and named, and every answer the undisturbed one."""

import asyncio
import json

from benchmarks.service_process import ServiceProcess
from dist_attn.text import train_bpe
from dist_attn_research.service.stops import observe
from tests.support import fake_rank
from tests.support.engines import running_engine
from tests.support.served import ROOT
from tests.support.service_server import model_folder
from tests.support.streams import Stream


def test_a_stopped_rank_is_noticed_and_named_while_streams_go_on(tmp_path, monkeypatch):
    """/readyz names the rank, and the streams go on when it is replaced and have the bits of a run in peace."""
    # With deadlines shorter than those of `serve`, whose promise `dist-attn bench service-stops` measures.
    # Real ranks take seconds to load; fake ones could be back between two looks at them.
    monkeypatch.setenv("FAKE_RANK_STARTS_S", "2")
    # Texts that do not change: none of the tokens of the streams is one that makes a fake rank fail.
    model = model_folder(tmp_path, train_bpe(sorted((ROOT / "docs" / "decisions").glob("000*.md")), fake_rank.VOCAB))
    sizes = {"vocab_size": fake_rank.VOCAB, "hidden_size": fake_rank.DIM, "kind": "tiny"}
    (model / "config.json").write_text(json.dumps(sizes))
    streams = [Stream(f"text {number}", "It was a dark night. " * (20_000 + number)) for number in range(2)]
    fields = {"ranks": 2, "losses_to_fail": 9, "save_tokens": 4096, "heartbeat_deadline_s": 1.5}
    with running_engine(**fields) as (handle, _, _):
        behind = {"ranks": 2, "model": str(model), "api_address": handle.api_address}
        with ServiceProcess(tmp_path, **behind) as service:
            found = asyncio.run(observe(service.url, streams, stops=1))
    (stop,) = found.stops
    assert stop.during == "reading" and stop.open_streams == 2 and stop.named
    assert 1.0 < stop.noticed_s <= stop.ready_s
    assert (found.equal, found.different, found.errors, found.false_alarms) == (2, [], [], 0)
    assert found.as_json()["named"] == 1
