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
from dist_attn.shipped import resolve_model_folder  # noqa: E402
from dist_attn.text import load_tokeniser  # noqa: E402
from dist_attn.wire.messages import SamplingSpec  # noqa: E402
from tests.support.models import small_config, small_model, write_small_folder  # noqa: E402
from tests.support.tokenisers import PROSE, small_bpe  # noqa: E402

pytestmark = pytest.mark.slow

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
    names = ["config.json", "generation_config.json", "manifest.json", "mine.txt", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names


def _text_folder(folder: Path, kind: str = "rfa_gate") -> Path:
    """A model folder whose tokens are those of words, and whose mixer also keeps a few tokens for a convolution."""
    config = small_config(kind, vocab_size=small_bpe().vocab_size)
    mixer = config.mixer.model_copy(update={"short_convolution": 3})
    save_model(small_model(config.model_copy(update={"mixer": mixer})), folder, tokeniser=small_bpe())
    return folder


def test_a_text_is_generated_in_one_line(tmp_path):
    """`generate(**tokenizer(text))` and the text-generation pipeline give the tokens that ours draws."""
    folder = _text_folder(tmp_path / "m")
    model, tokenizer = _load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("a b c", return_tensors="pt")
    want = generate(load_model(folder), inputs["input_ids"][0].tolist(), SamplingSpec(max_tokens=8, temperature=0.0))
    out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert out[0, inputs["input_ids"].shape[1] :].tolist() == want
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    (said,) = pipe("a b c", max_new_tokens=8, do_sample=False, return_full_text=False)
    assert said["generated_text"] == tokenizer.decode(want, skip_special_tokens=True)
    assert transformers.pipeline("text-generation", model=str(folder))("a b", max_new_tokens=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"use_cache": False}, {"num_beams": 3}], ids=["cache", "no-cache", "beams"])
def test_padding_before_a_text_changes_nothing(tmp_path, kind, options):
    """A batch of texts of different lengths, padded by the tokenizer, is continued as each of them alone."""
    folder = _text_folder(tmp_path / "m", kind)
    model, tokenizer = _load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["a", "b c, it was so", "and the other", "x y"]
    options |= {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()
    together = model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    for text, got in zip(texts, together, strict=True):
        alone = tokenizer(text, return_tensors="pt")
        assert model.generate(**alone, **options)[0, alone["input_ids"].shape[1] :].tolist() == got.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_losses_of_padded_texts_are_those_of_texts_alone(tmp_path, kind):
    """Logits behind padding are those without it, those of padding are 0, and the loss leaves padding out."""
    model, tokens = _load(write_small_folder(tmp_path / "m", kind=kind)), _prompt(2)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    out = model(tokens, attention_mask=mask, labels=tokens)
    whole, short = model(tokens[:1], labels=tokens[:1]), model(tokens[1:, 4:], labels=tokens[1:, 4:])
    torch.testing.assert_close(out.logits[0], whole.logits[0])
    torch.testing.assert_close(out.logits[1, 4:], short.logits[0])
    assert not out.logits[1, :4].any()
    torch.testing.assert_close(out.loss, (8 * whole.loss + 4 * short.loss) / 12)


def test_a_saved_folder_says_how_texts_end_and_are_padded(tmp_path):
    """A folder has the end token as eos and pad for transformers; what its tokenizer saves has our tokens too."""
    folder = _text_folder(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("<|end|>", "<|end|>", "left")
    assert tokenizer(["a", "b c"], padding=True)["attention_mask"][0][0] == 0
    for model in (_load(folder), _load(folder, subfolder="")):
        assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == small_bpe().end_token
    tokenizer.save_pretrained(tmp_path / "theirs")
    assert load_tokeniser(tmp_path / "theirs").digest == load_tokeniser(folder).digest == small_bpe().digest


def test_the_options_of_evaluation_harnesses_are_taken(tmp_path):
    """What lm-eval passes to `from_pretrained` loads the model, and a folder inside the one that is named is found."""
    folder = write_small_folder(tmp_path / "m")
    options = {"revision": "main", "dtype": "auto", "gguf_file": None, "quantization_config": None, "subfolder": ""}
    model = _load(folder, **options, device_map={"": "cpu"})
    assert model.device.type == "cpu"
    inner = _load(tmp_path, subfolder="m", load_in_8bit=False)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in inner.state_dict().items())


def test_options_and_masks_that_cannot_be_honoured_are_refused(tmp_path):
    """Masks with holes, quantisation and a folder that is not ours raise errors in words; a dtype is taken."""
    folder = write_small_folder(tmp_path / "m")
    model = _load(folder, dtype=torch.float64)
    assert model.dtype == torch.float64
    mask = torch.ones(1, 9, dtype=torch.int64)
    mask[0, 3:5] = 0
    with pytest.raises(ShapeError, match="hides tokens between others"):
        model(_prompt(), attention_mask=mask)
    with pytest.raises(ShapeError, match="hides all tokens of a row"):
        model(_prompt(), attention_mask=torch.zeros(1, 9))
    with pytest.raises(ShapeError, match=r"has shape \(1, 8\); needed is \(1, 9\)"):
        model(_prompt(), attention_mask=torch.ones(1, 8))
    with pytest.raises(ShapeError, match="padding_side = 'left'"):
        model.generate(_prompt(), attention_mask=(torch.arange(9) < 7).long()[None], max_new_tokens=1)
    with pytest.raises(InputError, match="was given attn_implementation; a model of dist-attn takes dtype, device_map"):
        hf.DistAttnForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with pytest.raises(ModelFolderError, match="no model at"):
        hf.DistAttnForCausalLM.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["books-6m", "books-6m-chapters"])
def test_the_shipped_models_load(name):
    """The shipped models' folders are ones that transformers knows, with an end token that pads."""
    folder = resolve_model_folder(name)
    assert _load(folder).generation_config.pad_token_id == 4095
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 4095


def test_without_transformers_one_line_names_the_extra():
    """Where transformers is missing, the import raises a MissingExtraError that says what to install."""
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from dist_attn.errors import MissingExtraError\n"
        "try:\n    import dist_attn.hf\n"
        "except MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "dist_attn.hf needs transformers: in the checkout, run .venv/bin/pip install -e '.[hf]'\n"
