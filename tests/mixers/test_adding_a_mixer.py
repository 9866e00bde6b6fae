"""The example of docs/adding-a-mixer.md, taken from the page and judged by the contract of all mixers."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.mixers import test_contract as contract

PAGE = (Path(__file__).resolve().parents[2] / "docs/adding-a-mixer.md").read_text()
NAME = "gated_convolution"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The page's mixer among those of the contract; its name there."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    module = ModuleType("gated_convolution_of_the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    exec(compile(block, "docs/adding-a-mixer.md", "exec"), module.__dict__)
    monkeypatch.setitem(contract.CONFIGS, NAME, module.GatedConvolutionConfig(hidden_size=contract.SIZE, taps=5))
    build = contract.build_mixer
    monkeypatch.setattr(
        contract, "build_mixer", lambda config: (module.GatedConvolution if config.kind == NAME else build)(config)
    )
    return NAME


def test_the_example_keeps_the_contract(example: str) -> None:
    """The page's mixer passes all that every mixer is asked: one call as a stream and as steps, ranks, and the rest."""
    assert type(contract._mixer(example)).__name__ == "GatedConvolution", "the contract judges another mixer"
    contract.test_parallel_equals_streamed_equals_stepwise(example)
    contract.test_the_future_changes_nothing(example)
    contract.test_batch_elements_do_not_touch_each_other(example)
    contract.test_a_step_of_training_under_autocast(example)
    contract.test_states_of_other_mixers_are_refused(example)
    for lengths in ((40, 50), (31, 19, 40), (0, 31, 2, 57), (90, 0)):
        contract.test_ranks_change_nothing(example, lengths)


def test_the_example_is_short() -> None:
    """The whole mixer, configuration and state included, has fewer than 80 lines of code."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    lines = [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert 40 < len(lines) < 80


def test_the_page_names_what_exists() -> None:
    """Every file that the page names is in the repository."""
    paths = set(re.findall(r"`((?:dist_attn|tests)/[\w./]+)`", PAGE))
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (Path(__file__).resolve().parents[2] / path).exists()] == []
