"""How the model that writes goes on from ten prompts, and how many of its words are not words."""

import json
import re
import shutil
import subprocess
from collections.abc import Collection

import torch

from benchmarks.measured import Found, Table
from benchmarks.setting import ROOT
from dist_attn.checkpoints import load_model_and_tokeniser
from dist_attn.errors import ConfigError
from dist_attn.models import CausalModel, ModelState
from dist_attn.shipped import resolve_model_folder, sha256
from dist_attn.text import Tokeniser

__all__ = ["NAME", "PROMPTS", "QUESTION", "TESTS", "continuations", "decoded", "measure", "words_of"]

NAME = "writer-words"
QUESTION = "How does writer-12m continue ten prompts, and how many of the words that it draws are not words?"
TESTS = ("papers/tests/test_writer.py", "tests/generation/test_text.py")
MODEL, TEXTS = "writer-12m", ROOT / "data/writer/train.jsonl"
PROMPTS = (
    "It was the best of times",
    "The old house at the end of the lane",
    "My fellow citizens,",
    "She opened the letter and read",
    "The ship had been at sea for forty days",
    "In the morning the inspector",
    "A recurrent state is",
    "The war was over, and",
    "'Where have you been?' asked",
    "There are three ways to",
)
TEMPERATURE, SEED = 0.7, 1
TOKENS, SMOKE_TOKENS, SHOWN_CHARACTERS, SHOWN_WORDS = 1_700, 20, 160, 20
NOTES = (
    f"Drawn at temperature {TEMPERATURE} from seed {SEED}, {TOKENS:,} tokens behind each prompt, in one batch.",
    "A word is a run of letters A to Z; the first and the last of each continuation may be parts of words and do not "
    "count. A non-word stands neither in the texts that the model was trained on, whatever "
    "its capitals, nor in hunspell's en_US.",
)


def measure(smoke: bool) -> Found:
    """Draw, look every word up, and show the beginnings.

    Raises: ConfigError where the texts of `dist-attn bench writer` or hunspell are not there.
    """
    needed = json.loads((resolve_model_folder(MODEL) / "manifest.json").read_text())["trained_on"][TEXTS.name]
    if not TEXTS.is_file() or sha256(TEXTS) != needed:
        raise ConfigError(
            f"{TEXTS} is not there with SHA-256 {needed}; make it with dist-attn bench writer {TEXTS.parent}"
        )
    if shutil.which("hunspell") is None:
        raise ConfigError("hunspell is not installed; on Debian it is the package hunspell, with hunspell-en-us")
    model, tokeniser = load_model_and_tokeniser(MODEL)
    drawn = continuations(model, tokeniser, SMOKE_TOKENS if smoke else TOKENS)
    with TEXTS.open(encoding="utf-8") as lines:
        known = {word.lower() for line in lines for word in words_of(json.loads(line)["text"])}
    words = [word for text in drawn for word in words_of(text)[1:-1]]
    unknown = _not_in_dictionary({word for word in words if word.lower() not in known})
    non_words = [word for word in words if word in unknown]
    share = len(non_words) / len(words)
    counts = Table(
        "Words", ("drawn", "non-words", "share"), ((f"{len(words):,}", f"{len(non_words):,}", f"{100 * share:.2f} %"),)
    )
    beginnings = [" ".join(text[:SHOWN_CHARACTERS].split()) for text in drawn]
    continued = Table("Continuations", ("prompt", "goes on"), tuple(zip(PROMPTS, beginnings, strict=True)))
    notes = (*NOTES, "The first non-words: " + ", ".join(non_words[:SHOWN_WORDS]) + ".")
    numbers = {"words": float(len(words)), "non-words": float(len(non_words))}
    return Found((counts, continued), {"non-words / words": round(share, 5)}, numbers, (), notes)


@torch.inference_mode()
def continuations(model: CausalModel, tokeniser: Tokeniser, tokens: int) -> list[str]:
    """What follows each prompt."""
    generator = torch.Generator().manual_seed(SEED)
    states, logits = list[ModelState](), list[torch.Tensor]()
    for prompt in PROMPTS:
        prompt_1L = torch.from_numpy(tokeniser.encode(prompt.encode())).long()[None]
        h_1LD, state = model.hidden(prompt_1L)
        states.append(state)
        logits.append(model.readout(h_1LD[:, -1]))
    state, logits_BV = ModelState.stack(states), torch.cat(logits)
    drawn = []
    for _ in range(tokens):
        token_B = torch.multinomial(torch.softmax(logits_BV / TEMPERATURE, -1), 1, generator=generator)[:, 0]
        drawn.append(token_B)
        logits_BV, state = model.step(token_B, state)
    return [decoded(tokeniser, text_L.tolist()) for text_L in torch.stack(drawn, 1)]


def decoded(tokeniser: Tokeniser, tokens: list[int]) -> str:
    """The text, with an empty line where one ended and another began."""
    texts, ended = [list[int]()], tokeniser.end_token
    for token in tokens:
        if token == ended:
            texts.append([])
        else:
            texts[-1].append(token)
    return "\n\n".join(tokeniser.decode(text).decode(errors="replace") for text in texts)


def words_of(text: str) -> list[str]:
    """Runs of letters."""
    return re.findall(r"[A-Za-z]+", text)


def _not_in_dictionary(words: Collection[str]) -> set[str]:
    listed = "\n".join(sorted(words))
    found = subprocess.run(["hunspell", "-d", "en_US", "-l"], input=listed, capture_output=True, text=True, check=True)
    return {*found.stdout.split()}
