"""`dist-attn plan`: the figures as a table and as JSON, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dist_attn.commands.options import PlanOptions
from dist_attn.commands.plan import plan
from dist_attn.commands.tables import byte_size, duration
from dist_attn.control.settings import ControlSettings
from dist_attn.costs import Calibration, ScanTime, calibration_file, default_exchange, estimate, read_model_costs
from dist_attn.errors import ConfigError, InputError, ModelFolderError
from dist_attn.model_config.figures import BLOCK_TOKENS, GPU_TOKENS
from tests.support.model_cases import write_config
from tests.support.tokenisers import foreign_contents


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with a configuration and no weights: nothing more is needed. No exchange was measured here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(write_config("gated", tmp_path / "small"))


def test_json_holds_the_estimate(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON form is one line with every figure of the estimate, in bytes and seconds."""
    plan(PlanOptions(tokens="1_000_000", ranks=4, model=folder, gflops=50, as_json=True))
    out = capsys.readouterr().out
    found = json.loads(out)
    want = estimate(read_model_costs(Path(folder)), 10**6, ranks=4)
    assert out.count("\n") == 1
    assert (found["object"], found["model"], found["tokens"], found["ranks"]) == ("plan", "small", 10**6, 4)
    assert found["memory_bytes_per_rank"]["peak"] == want.memory.peak
    assert found["carry_bytes_sent"] == want.carry_bytes_sent > 0
    assert found["output"]["window"]["npy"] == want.output["window"]["npy"]
    assert found["assumed_rates_per_rank"]["matmul_flops_per_s"] == 50e9
    assert found["compute_seconds"] == pytest.approx(want.compute_seconds * 30 / 50)
    assert found["exchange"] == "gather"
    parts = ("compute_seconds", "exchange_seconds", "text_seconds", "handing_seconds")
    assert found["prefill_seconds"] == pytest.approx(sum(found[part] for part in parts))


def test_states_of_a_downloaded_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a text's state takes is told of a folder of transformers, which keeps keys and values of every token."""
    pytest.importorskip("transformers", reason="the folder is written by transformers")
    from tests.support.downloaded import qwen3_next, save  # it needs transformers itself

    save(qwen3_next(384), tmp_path)
    (tmp_path / "tokenizer.json").write_text(foreign_contents())
    plan(PlanOptions(tokens="1k", ranks=4, model=str(tmp_path), as_json=True))
    found = json.loads(capsys.readouterr().out)
    # In each of two layers keys and values of 8 numbers for each of two heads.
    assert found["state_bytes"]["per_token"] == 2 * 2 * 2 * 8 * 4
    memory, first = found["memory_bytes_per_rank"], found["state_bytes"]["before_any_token"]
    # Where it is drawn from with room for a quarter more.
    assert (memory["state"], memory["state_of_encoding"]) == (first + 256 * 1250, first + 256 * 250)
    assert memory["weights"] == 4 * found["parameters"]


def test_weights_of_fewer_bits_are_planned_with(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Held as int8 they take less, whatever is read takes what it did, and loading them is the peak that it was."""
    plans = {}
    for weights in ("float32", "int8"):
        plan(PlanOptions(tokens="1M", ranks=1, model=folder, as_json=True, weights=weights))  # type: ignore[arg-type]
        plans[weights] = json.loads(capsys.readouterr().out)
        assert plans[weights]["weights"] == weights
    before, after = (plans[weights]["memory_bytes_per_rank"] for weights in ("float32", "int8"))
    assert 0.2 * before["weights"] < after["weights"] < 0.5 * before["weights"]
    assert after["loading"] == before["loading"] == 2 * before["weights"]
    assert before["activations"] < after["activations"] < 1.2 * before["activations"]
    assert plans["int8"]["decode_tokens_per_second"] > plans["float32"]["decode_tokens_per_second"]
    plan(PlanOptions(tokens="1M", ranks=1, model=folder, as_json=False, weights="int8"))
    out = capsys.readouterr().out
    assert "weights, int8" in out and "while weights are read" in out


def test_a_stream_encoder_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """It has costs of reading and none of writing; it is not measured, and its weights are float32."""
    for as_json in (True, False):
        plan(PlanOptions(tokens="2M", ranks=2, model="minilm-stream", as_json=as_json))
    found, table = capsys.readouterr().out.split("\n", 1)
    assert json.loads(found)["carry_bytes_sent"] > 0 and json.loads(found)["decode_tokens_per_second"] is None
    assert "tokens read per second" in table and "written" not in table and "--measure" not in table
    for options, error in (({"measure": True}, InputError), ({"weights": "int8"}, ConfigError)):
        with pytest.raises(error, match="stream_encoder"):
            plan(PlanOptions(tokens="2M", ranks=1, model="minilm-stream", as_json=True, **options))  # type: ignore[arg-type]


def test_the_exchange_is_the_one_that_ranks_would_choose(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan counts the bytes of the exchange measured fastest here, else of the rule's, else of the one named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    message = read_model_costs(Path(folder)).carry_bytes
    times = [ScanTime("gloo", 3, "log_step", message, 1e-3), ScanTime("gloo", 3, "gather", message, 2e-3)]
    Calibration(tuple(times)).write(calibration_file({"XDG_CACHE_HOME": str(tmp_path)}))

    def planned(ranks: int, **options: str) -> str:
        plan(PlanOptions(tokens="2M", ranks=ranks, model=folder, as_json=True, **options))
        return str(json.loads(capsys.readouterr().out)["exchange"])

    assert [planned(ranks) for ranks in (1, 2, 3, 9)] == ["", "pair", "log_step", "log_step"]
    assert planned(3, backend="mpi") == default_exchange(3)
    assert planned(3, exchange="pipelined_ring") == "pipelined_ring"


def test_table_is_plain_where_nobody_looks(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Into a pipe the table is plain text without colour, boxes or wrapped lines, and says which rates it assumes."""
    plan(PlanOptions(tokens="2M", ranks=2, model=folder, as_json=False))
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert out.startswith("2,000,000 tokens on 2 ranks with small (")
    parts = ("computing", "held up by exchanges", "reading and tokenising", "handing tokens out and rows back")
    for title in ("Memory per rank", "Exchange per rank", "states, by pair", *parts, "Output", "peak", "ndjson"):
        assert title in out
    assert "Assumed for each rank: 30 GFLOP/s" in out


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"tokens": "many"}, InputError, "'many' is not a number of tokens"),
        ({"gflops": 0.0}, InputError, "--gflops 0"),
        ({"gflops": float("nan")}, InputError, "--gflops nan"),
        ({"gflops": 50.0, "measure": True}, InputError, "one of them"),
        ({"weights": "int8", "measure": True}, InputError, "--weights int8"),
        ({"ranks": 0}, InputError, "ranks is 0"),
        ({"ranks": 3, "exchange": "pair"}, ConfigError, "for 2 ranks"),
        ({"model": "no such model"}, ModelFolderError, "no such model"),
    ],
)
def test_refuses(folder: str, changes: dict[str, object], error: type[Exception], says: str) -> None:
    """What cannot be planned is refused with what was given."""
    arguments: dict[str, object] = {"tokens": "2M", "ranks": 1, "model": folder, "as_json": True}
    with pytest.raises(error, match=says):
        plan(PlanOptions(**{**arguments, **changes}))  # type: ignore[arg-type]


def test_refuses_a_model_without_formulas(tmp_path: Path) -> None:
    """A folder whose config.json is of an unknown kind is refused."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size: it is missing"):
        plan(PlanOptions(tokens="2M", ranks=1, model=str(tmp_path), as_json=True))


def test_blocks_are_as_long_as_a_step_of_the_engine() -> None:
    """A step of the engine has as many tokens as a block of `encode`, which plans count with."""
    assert ControlSettings(api_address="ipc:///tmp/x", model="m").block_tokens == BLOCK_TOKENS


def test_blocks_of_a_gpu_are_planned_with(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the device is a GPU the plan has the larger blocks that are read there, and the memory that they take."""
    found = []
    for device in ("cpu", "cuda"):
        plan(PlanOptions(tokens="1M", model=folder, device=device, gflops=100.0, as_json=True))
        found.append(json.loads(capsys.readouterr().out))
    assert [each["block_tokens"] for each in found] == [BLOCK_TOKENS, GPU_TOKENS]
    cpu, gpu = (each["memory_bytes_per_rank"]["activations"] for each in found)
    assert gpu > 2 * cpu


def test_planning_never_loads_torch(folder: str) -> None:
    """A plan is made in an interpreter that never loads torch."""
    code = (
        "import sys; from dist_attn.commands.options import PlanOptions; from dist_attn.commands.plan import plan; "
        f"plan(PlanOptions(tokens='2M', ranks=2, model={folder!r}, as_json=True)); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 50, "3,072.0 TiB")],
)
def test_byte_sizes(count: int, text: str) -> None:
    """Bytes are shown in the largest unit that fits."""
    assert byte_size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2e-6, "2 us"), (0.0015, "1.5 ms"), (59.94, "59.9 s"), (600, "10 min"), (9000, "2.5 h"), (864000, "10.0 days")],
)
def test_durations(seconds: float, text: str) -> None:
    """Seconds are shown as people say them."""
    assert duration(seconds) == text
