"""Tools that people own, against a served engine: each runs its program where its package is installed.

`TOOLS_PYTHON=PYTHON:PYTHON` names interpreters that may have them; left out, this one is asked.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_attn.shipped import resolve_model_folder
from tests.support.models import write_small_folder
from tests.support.served import ROOT, Served, served

PROGRAM = Path(__file__).with_name("tools_program.py")
PYTHONS = os.environ.get("TOOLS_PYTHON", sys.executable).split(os.pathsep)
RUN_SECONDS = 300
PACKAGES = {
    "openai": "openai", "instructor": "instructor", "pydantic_ai": "pydantic_ai", "langchain": "langchain_openai",
    "llama_index": "llama_index.embeddings.text_embeddings_inference", "cohere": "cohere", "litellm": "litellm",
    "haystack": "haystack", "lm_eval": "lm_eval", "tuspy": "tusclient",
    "sentence_transformers": "sentence_transformers",
}  # fmt: skip
TEMPLATE = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}\n{% endfor %}{# <tool_call> #}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A small random model with a template that tells tools, and the encoder that ships."""
    folder = tmp_path_factory.mktemp("tools")
    model = write_small_folder(folder / "tiny")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with served(folder, "--encoder=minilm-stream", "--dtype=float32", model=model) as running:
        yield running


def _has(python: str, package: str) -> bool:
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return not subprocess.run([python, "-c", look], capture_output=True, timeout=120).returncode


@pytest.mark.parametrize("tool", PACKAGES)
def test_a_tool_works_as_its_users_use_it(tool: str, whole: Served, tmp_path: Path) -> None:
    """The calls that docs/how-to/tools.md lists, whatever the model writes."""
    ours = tool == "sentence_transformers"  # which imports this package
    python = next((one for one in ([sys.executable] if ours else PYTHONS) if _has(one, PACKAGES[tool])), None)
    if python is None:
        pytest.skip(f"{PACKAGES[tool]} is not installed for {' or '.join(PYTHONS)}")
    model = whole.data.parent / "tiny"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or ours}
    environment |= {"TOOLS_MODEL": str(model), "TOOLS_ENCODER": str(resolve_model_folder("minilm-stream"))}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    command = [python, PROGRAM, tool, whole.url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_SECONDS, env=environment, cwd=ROOT if ours else tmp_path
    )
    assert done.returncode == 0 and "as it should be" in done.stdout, done.stderr[-3000:]
