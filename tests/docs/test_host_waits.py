"""The page on GPUs has a row for everything in the engine's code that reads a number back from a device.

What runs on `meta` in `tests/models/test_meta_device.py` finds any other wait on the paths that it takes.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("adapters", "comm", "generation", "mixers", "models", "ops", "rank", "sharded", "training")
READS = {"cpu", "item", "nonzero", "numpy", "tolist"}
FILLS = {"as_tensor", "new_tensor"}  # from numbers of the host: by a copy that is waited for
NAMED_BY_SHAPE = re.compile(r"_[A-Z][A-Z0-9]*$")

# By the row of the page: the functions that wait there. The last group reads what never was on a device.
ROWS = {
    "drawing a token": {
        "generation.sampling.sample",
        "generation.sampling.token_logprobs",
        "rank.decode_slots.DecodeSlots._draw_batch",
    },
    "a block whose rows are answered": {
        "generation.sampling.sequence_scores",
        "rank.row_pieces.reduce_to_pieces",
        "rank.sequence_executor.vectors_together",
        "rank.sequence_executor._read_marked",
        "rank.sequence_executor.row_pieces",
    },
    "the last block of a prompt that goes on from its logits": {"rank.executor.ModelExecutor._logits"},
    "a stored state, a saved or moved session": {
        "generation.state_snapshot._array",
        "models.causal_model.ModelState.position",
        "rank.state_bytes._bytes",
    },
    "a session in slots that comes or goes": {"models.causal_model.ModelState.select"},
    "counts of guarded denominators": {"ops.watch.Watch.guarded"},
    "`engine.check_finite`": {"ops.finite._look", "rank.decode_slots.DecodeSlots._draw_batch"},
    "loading a model": {"ops.narrow_weights.round_rows"},
    "a training step": {
        "training.loop._Run._guarded",
        "training.loop._Run._train_step",
    },
    "validation": {
        "training.chapters.window_rows",
        "training.classification.Tally.add",
        "training.classification.Tally.scores",
        "training.evaluation._nats",
        "training.evaluation.evaluate_file",
    },
    "a transformers call with an attention mask or positions, texts of sentence-transformers": {
        "hf.DistAttnModel._read",
        "hf._check_positions",
        "hf.SentenceModule.forward",
    },
    "a batch that is cut over ranks, `cu_seqlens`": {
        "ops.fla._run",
        "adapters.context_parallel.ContextParallel.shard",
        "adapters.context_parallel._hides",
        "adapters.context_parallel.ContextParallel.sum_gradients",
        "adapters.context_parallel._documents",
    },
    "what ranks agree on": {
        "adapters.spread.SpreadLayers._all_weights",
        "comm.base.Communicator._compare",
        "comm.base.Communicator.all_gather_text",
        "comm.base.Communicator.hosts",
        "comm.base.Communicator.split",
        "comm.base.Communicator.told_by_first",
        "rank.layers_apart.LayersApart.tell",
        "rank.layers_apart.LayersApart.whole",
    },
}
ON_THE_HOST = {
    "adapters.experts.experts",  # of tokens on a CPU
    "comm.mpi.MpiCommunicator._post",
    "comm.mpi_library.Scan.__init__",
    "generation.decode.generate",  # the prompt
    "generation.sampling._check_row",
    "generation.sampling._draw",
    "models.encoder.with_positions",  # of a model on a CPU
    "models.stream_encoder.StreamEncoder._check_cuts",  # positions, which lie on the CPU there
    "ops.linear_attention.split.tokens_until_forgotten",  # not asked of a GPU
    "ops.linear_attention.streaming._vanished",  # nor this
    "rank.executor.ModelExecutor.prefill",  # ends of rows in the tokens of a message
    "rank.row_pieces.score_pieces",
    "rank.sequence_executor.SequenceExecutor.prefill",
    "sharded.redistribution_plan._players",
    "training.chapters.find_chapters",
    "training.text_tasks.TextClassificationTask._classify",
}


def test_every_wait_of_the_host_has_its_row() -> None:
    """Each function that reads a device's numbers has a row of the page, and each row but one has functions."""
    page = (ROOT / "docs/how-to/gpus.md").read_text().partition("\n## Where the host waits\n")[2]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert {row.partition(" (")[0] for row in rows} == ROWS.keys() | {"exchanges that differ from call to call"}
    waiting = {name for path in _files() for name in _reading(path)}
    assert waiting == ON_THE_HOST.union(*ROWS.values())


def _files() -> Iterator[Path]:
    yield ROOT / "dist_attn" / "hf.py"
    for package in PACKAGES:
        yield from sorted((ROOT / "dist_attn" / package).rglob("*.py"))


def _reading(path: Path) -> Iterator[str]:
    """The functions of a file that read numbers, but for oracles, which are the host's."""
    module = ".".join(path.relative_to(ROOT / "dist_attn").with_suffix("").parts)
    if not module.startswith("training.datasets."):
        yield from _within(ast.parse(path.read_text()), module)


def _within(node: ast.AST, name: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        inner = f"{name}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else name
        if inner.endswith("_naive"):
            continue
        if isinstance(child, ast.Call) and _reads(child):
            yield name
        yield from _within(child, inner)


def _reads(call: ast.Call) -> bool:
    function, given = call.func, [*call.args, *(keyword.value for keyword in call.keywords)]
    if isinstance(function, ast.Attribute):
        to_host = any(isinstance(value, ast.Constant) and value.value == "cpu" for value in given)
        return function.attr in READS or function.attr in FILLS or (function.attr == "to" and to_host)
    converts = isinstance(function, ast.Name) and function.id in ("bool", "float", "int") and bool(given)
    return converts and _of_a_tensor(given[0])


def _of_a_tensor(node: ast.AST) -> bool:
    """Whether a tensor's numbers enter, by its name; its sizes are known to the host."""
    parts = list(ast.walk(node))
    names = [part.id if isinstance(part, ast.Name) else getattr(part, "attr", "") for part in parts]
    return "shape" not in names and any(NAMED_BY_SHAPE.search(name) for name in names)
