"""The commands of docs/how-to/your-model.md over a generated folder, as printed, with two ranks in place of four."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.block_runs import prepare
from tests.docs.blocks import ROOT, blocks_of, commands_of
from tests.support.programs import free_port
from tests.support.source_path import SOURCE_PATH
from tests.support.tokenisers import foreign_contents

pytest.importorskip("transformers", reason="the folder is written by transformers")
SECONDS = 500  # ranks import transformers at the same time


@pytest.mark.slow
def test_five_commands_from_a_folder_to_a_streamed_answer(tmp_path: Path) -> None:
    """All of them succeed, and the service over ranks streams an answer of as many tokens as were asked for."""
    from tests.support.downloaded import qwen3_next

    prepare(tmp_path)
    folder = tmp_path / "downloads/qwen3-next"
    model = qwen3_next(vocab_size=352).bfloat16()
    # No token ends a text, which a draw of weights that are random might begin with.
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text(foreign_contents())
    port = str(free_port())
    block, _ = blocks_of(ROOT / "docs/how-to/your-model.md")
    assert "--ranks 4 " in block.code  # here two, as each loads transformers
    commands = commands_of(
        block.code.replace("localhost:8000", f"localhost:{port}").replace("--ranks 4 ", "--ranks 2 ")
    )
    assert len(commands) == 5
    environment = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": SOURCE_PATH,
        "DIST_ATTN_HTTP__PORT": port, "XDG_DATA_HOME": str(tmp_path / "data"),
    }  # fmt: skip
    script = "\n".join(["set -eu", "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT", *commands, "wait"])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{(tmp_path / 'serve.log').read_text()}"
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert choices[-1]["finish_reason"] == "length" and any(choice["text"] for choice in choices)
