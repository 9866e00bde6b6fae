"""Our folders in transformers: loaded by its Auto classes, run, generated with, trained a step, saved again."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="dist_attn.hf needs transformers")

from dist_attn import hf  # noqa: E402
from dist_attn.checkpoints import load_model, save_model  # noqa: E402
from dist_attn.errors import InputError, ModelFolderError, ShapeError  # noqa: E402
from dist_attn.generation import generate  # noqa: E402
from dist_attn.text import load_tokeniser  # noqa: E402
from dist_attn.wire.messages import SamplingSpec  # noqa: E402
from tests.support.models import small_config, small_model, write_small_folder  # noqa: E402
from tests.support.tokenisers import PROSE, small_bpe  # noqa: E402

KINDS = ["rfa_gate", "softmax"]


def _load(folder: Path, **options: object) -> hf.DistAttnForCausalLM:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options)


def _prompt(rows: int = 1, length: int = 9) -> torch.Tensor:
    return torch.randint(0, 257, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
def test_auto_classes_load_our_folders(tmp_path, kind):
    """AutoModelForCausalLM gives our model bit for bit, in evaluation mode, and its logits and loss are ours."""
    folder = write_small_folder(tmp_path / "m", kind=kind)
    model, own, tokens = _load(folder), load_model(folder), _prompt(2)
    assert isinstance(model, hf.DistAttnForCausalLM)
    assert not model.training
    assert all(torch.equal(t, own.state_dict()[name]) for name, t in model.model.state_dict().items())
    mask = torch.ones_like(tokens)
    mask[1, 6:] = 0
    out = model(tokens, attention_mask=mask, labels=tokens)
    logits = own.logits(tokens)
    assert torch.equal(out.logits, logits)
    want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert torch.equal(out.loss, want)
    assert model.config.language_model == own.config


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_ours(tmp_path, kind):
    """`generate` draws the tokens that ours draws, with the state as cache and without, several rows at once."""
    folder = write_small_folder(tmp_path / "m", kind=kind)
    model, own, prompts = _load(folder), load_model(folder), _prompt(3)
    spec = SamplingSpec(max_tokens=12, temperature=0.0)
    want = [generate(own, row.tolist(), spec) for row in prompts]
    for use_cache in (True, False):
        got = model.generate(prompts, max_new_tokens=12, do_sample=False, use_cache=use_cache, eos_token_id=None)
        assert got[:, 9:].tolist() == want


def test_the_state_is_the_cache(tmp_path):
    """Every token is read once: the prompt in one call, then one token at a time from a state that does not grow."""
    model, lengths = _load(write_small_folder(tmp_path / "m")), []
    forward = model.model.forward

    def counting(tokens, *rest):
        lengths.append(tokens.shape[1])
        return forward(tokens, *rest)

    model.model.forward = counting
    out = model.generate(_prompt(), max_new_tokens=5, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    assert lengths == [9, 1, 1, 1, 1]
    assert out.past_key_values.get_seq_length() == 13
    model(_prompt(), past_key_values=out.past_key_values)
    assert out.past_key_values.get_seq_length() == 22


def test_beams_are_reordered(tmp_path):
    """Beam search by transformers gives the same texts with states that follow their beams as without a cache."""
    model = _load(write_small_folder(tmp_path / "m"))
    options = {"max_new_tokens": 6, "num_beams": 4, "do_sample": False, "eos_token_id": None}
    cached = model.generate(_prompt(2), use_cache=True, **options)
    assert torch.equal(cached, model.generate(_prompt(2), use_cache=False, **options))


def test_the_end_token_ends_the_text(tmp_path):
    """The tokeniser's end token is that of the configuration; where it is drawn, generation ends."""
    model = _load(write_small_folder(tmp_path / "m"))
    assert model.generation_config.eos_token_id == 256
    first = int(model(_prompt()).logits[0, -1].argmax())
    model.generation_config.eos_token_id = first
    assert model.generate(_prompt(), max_new_tokens=8, do_sample=False).shape == (1, 10)


def test_the_tokens_are_ours(tmp_path):
    """AutoTokenizer gives the tokens of our tokeniser on prose, and its text back."""
    config = small_config(vocab_size=small_bpe().vocab_size)
    save_model(small_model(config), tmp_path / "m", tokeniser=small_bpe())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    want = load_tokeniser(tmp_path / "m").encode(PROSE.encode()).tolist()
    assert tokenizer(PROSE)["input_ids"] == want
    assert tokenizer.decode(want) == PROSE


def test_a_model_is_trained_and_saved(tmp_path):
    """Gradients reach every parameter, a step lowers the loss, and what is saved is a folder of ours and theirs."""
    model, tokens = _load(write_small_folder(tmp_path / "m")).train(), _prompt(2, 30)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    before = model(tokens, labels=tokens).loss
    before.backward()
    assert all(p.grad is not None for p in model.parameters())
    optimiser.step()
    assert model(tokens, labels=tokens).loss.item() < before.item()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "mine.txt").write_text("kept")
    model.save_pretrained(tmp_path / "saved")
    for again in (load_model(tmp_path / "saved"), _load(tmp_path / "saved").model):
        assert all(torch.equal(t, model.model.state_dict()[name]) for name, t in again.state_dict().items())
    names = ["config.json", "manifest.json", "mine.txt", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names


def test_options_and_masks_that_cannot_be_honoured_are_refused(tmp_path):
    """Left padding, quantisation and a folder that is not ours raise errors in words; a dtype is taken."""
    folder = write_small_folder(tmp_path / "m")
    model = _load(folder, dtype=torch.float64)
    assert model.dtype == torch.float64
    mask = torch.ones(1, 9, dtype=torch.int64)
    mask[0, :3] = 0
    with pytest.raises(ShapeError, match="pad on the right"):
        model(_prompt(), attention_mask=mask)
    with pytest.raises(
        InputError, match="was given attn_implementation; a model of dist-attn takes dtype and device_map"
    ):
        hf.DistAttnForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with pytest.raises(ModelFolderError, match="no model at"):
        hf.DistAttnForCausalLM.from_pretrained(tmp_path / "nowhere")


def test_the_shipped_model_loads():
    """The shipped model's folder is one that transformers knows."""
    from dist_attn.shipped import default_model_folder

    assert _load(default_model_folder()).config.model_type == "dist_attn"


def test_without_transformers_one_line_names_the_extra():
    """Where transformers is missing, the import raises a MissingExtraError that says what to install."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from dist_attn.errors import MissingExtraError\n"
        "try:\n    import dist_attn.hf\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "dist_attn.hf needs transformers: pip install 'dist-attn[hf]'\n"
