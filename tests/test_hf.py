"""Our folders in transformers: loaded by its Auto classes, run, generated with, trained a step, saved again."""

import copy
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="dist_attn.hf needs transformers")

from dist_attn import hf  # noqa: E402
from dist_attn.checkpoints import load_model, save_model  # noqa: E402
from dist_attn.errors import InputError, MissingExtraError, ModelFolderError, ShapeError  # noqa: E402
from dist_attn.generation import generate  # noqa: E402
from dist_attn.shipped import resolve_model_folder  # noqa: E402
from dist_attn.text import SentencePieceTokeniser, load_tokeniser  # noqa: E402
from dist_attn.wire.messages import SamplingSpec  # noqa: E402
from tests.support.models import small_config, small_model, write_small_folder  # noqa: E402
from tests.support.tokenisers import PROSE, downloaded_contents, small_bpe  # noqa: E402

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
    hidden = model.model.hidden

    def counting(tokens, *rest):
        lengths.append(tokens.shape[1])
        return hidden(tokens, *rest)

    model.model.hidden = counting
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
    kept = {"generation_config.json", "manifest.json", "mine.txt", "model.safetensors", "modeling_dist_attn.py"}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"config.json", *kept}


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
    torch.testing.assert_close(out.logits[0], whole.logits[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(out.logits[1, 4:], short.logits[0], rtol=0, atol=1e-5)
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
    inner = _load(
        tmp_path, subfolder="m", load_in_8bit=False, attn_implementation="sdpa", token="t", cache_dir=tmp_path
    )
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
    with pytest.raises(InputError, match="was given load_in_8bit; a model of dist-attn takes dtype, device_map"):
        _load(folder, load_in_8bit=True)
    with pytest.raises(InputError, match="dtype 'int8'; needed is one such as float32"):
        hf.DistAttnForCausalLM.from_pretrained(folder, dtype="int8")
    with pytest.raises(InputError, match="is of another model than that in"):
        _load(folder, num_layers=1)
    with pytest.raises(InputError, match="push_to_hub"):
        model.save_pretrained(tmp_path / "pushed", push_to_hub=True)
    with pytest.raises(ModelFolderError, match="no model at"):
        hf.DistAttnForCausalLM.from_pretrained(tmp_path / "nowhere")


def test_what_a_model_does_not_have_is_refused_in_words(tmp_path):
    """Vectors for tokens, states of layers, a cache of transformers', and packed positions raise errors that say so."""
    model, tokens = _load(write_small_folder(tmp_path / "m")), _prompt(2)
    with pytest.raises(InputError, match="reads tokens: give input_ids"):
        model(inputs_embeds=torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match="inputs_embeds"):
        model.generate(inputs_embeds=torch.zeros(1, 2, 16), max_new_tokens=1)
    with pytest.raises(InputError, match="output_hidden_states and output_attentions are not offered"):
        model.generate(tokens, output_hidden_states=True, return_dict_in_generate=True, max_new_tokens=1)
    with pytest.raises(InputError, match=r"is a DynamicCache; needed is dist_attn\.hf\.StateCache"):
        model.generate(tokens, cache=transformers.DynamicCache(), max_new_tokens=1)
    with pytest.raises(InputError, match="labels need the logits of all tokens"):
        model(tokens, labels=tokens, logits_to_keep=1)
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    with pytest.raises(InputError, match="position_ids are not those of one text"):
        model(tokens[:1], position_ids=packed)
    cache = model(tokens[:, :5]).past_key_values
    model(tokens[:, 5:], cache=cache, position_ids=torch.arange(5, 9)[None])
    with pytest.raises(InputError, match="cannot be cropped"):
        cache.crop(1)
    with pytest.raises(InputError, match="two names of one"):
        model(tokens, cache=cache, past_key_values=type(cache)())


def test_automodel_gives_hidden_states(tmp_path):
    """AutoModel gives what our `encode` gives, behind padding too, and what it saves is a language model."""
    folder, tokens = write_small_folder(tmp_path / "m"), _prompt(2)
    model, own = transformers.AutoModel.from_pretrained(folder), load_model(folder)
    assert torch.equal(model(tokens).last_hidden_state, own.encode(tokens))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    hidden = model(tokens, attention_mask=mask, return_dict=False)[0]
    torch.testing.assert_close(hidden[:1, 3:], own.encode(tokens[:1, 3:]), rtol=0, atol=1e-5)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(_load(tmp_path / "saved")(tokens).logits, own.logits(tokens))


def test_tokens_of_several_texts_and_streams(tmp_path, capsys):
    """Segments of a tokenizer change nothing, a text is continued in several ways, and a streamer says what comes."""
    folder = _text_folder(tmp_path / "m")
    model, tokenizer = _load(folder), transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer("a b c", return_tensors="pt", return_token_type_ids=True)
    options = {"do_sample": False, "eos_token_id": None}
    want = model.generate(inputs["input_ids"], max_new_tokens=6, **options)
    assert torch.equal(model.generate(**inputs, max_new_tokens=6, **options), want)
    assert torch.equal(model.generate(**inputs, max_new_tokens=1, **options), want[:, :-5])
    beams = model.generate(**inputs, num_beams=4, num_return_sequences=3, max_new_tokens=3, **options)
    drawn = model.generate(**inputs, do_sample=True, num_return_sequences=3, max_new_tokens=3, eos_token_id=None)
    assert beams.shape == drawn.shape == (3, want.shape[1] - 3)
    model.generate(**inputs, max_new_tokens=6, streamer=transformers.TextStreamer(tokenizer), **options)
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(want[0]).rstrip("\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_goes_on_and_is_kept(tmp_path, kind):
    """A copy of the cache of one prompt is continued as the whole text is, once and with several rows."""
    model, tokens = _load(write_small_folder(tmp_path / "m", kind=kind)), _prompt(2)
    prompt = torch.cat([tokens[:1, :6]] * 2)
    with torch.no_grad():
        cache = model(prompt[:1]).past_key_values
    texts = torch.cat([prompt, tokens[:, :3]], 1)
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    want = model.generate(texts, **options)
    one = model.generate(texts[:1], cache=copy.deepcopy(cache), **options)
    assert torch.equal(one, want[:1])
    cache.batch_repeat_interleave(2)
    assert torch.equal(model.generate(texts, cache=cache, **options), want)


def test_only_the_logits_that_are_asked_for(tmp_path):
    """`logits_to_keep` gives the logits of the last columns, and `generate` asks for one."""
    model, tokens = _load(write_small_folder(tmp_path / "m")), _prompt(2)
    whole = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, whole[:, -2:])
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([0, 4])).logits, whole[:, [0, 4]])
    seen, readout = [], model.model.readout
    model.model.readout = lambda h: (seen.append(h.shape[1]), readout(h))[1]
    model.generate(tokens, max_new_tokens=2, do_sample=False, eos_token_id=None)
    assert seen == [1, 1]


def test_activations_are_recomputed_where_it_is_asked(tmp_path):
    """With transformers' flag the gradients are bitwise those without, and every layer recomputes."""
    model, tokens = _load(write_small_folder(tmp_path / "m")).train(), _prompt(2)
    grads = []
    for enabled in (False, True):
        if enabled:
            model.activation_checkpointing_enable()
        assert model.is_activation_checkpointing == enabled
        assert {block.recomputes for block in model.model.blocks} == {enabled}
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_converted_folder_tells_its_tokens(tmp_path):
    """AutoConfig and the generation configuration have the ids with which a tokenizer begins, ends and pads texts."""
    about = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    tokens = SentencePieceTokeniser(json.loads(downloaded_contents("llama2")), "</s>", about=about)
    save_model(small_model(small_config(vocab_size=tokens.vocab_size)), tmp_path / "m", tokeniser=tokens)
    tokenizer, model = transformers.AutoTokenizer.from_pretrained(tmp_path / "m"), _load(tmp_path / "m")
    want = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert want == (1, 2, 0)
    for said in (transformers.AutoConfig.from_pretrained(tmp_path / "m"), model.config, model.generation_config):
        assert (said.bos_token_id, said.eos_token_id, said.pad_token_id) == want
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    assert load_tokeniser(tmp_path / "saved").digest == tokens.digest
    assert transformers.AutoConfig.from_pretrained(tmp_path / "saved").pad_token_id == 0


def test_a_folder_brings_its_classes(tmp_path):
    """With trust_remote_code the Auto classes load a saved folder, and one that ships, in processes without ours."""
    code = (
        "import os, sys, transformers as t\n"
        "autos = (t.AutoTokenizer, t.AutoConfig, t.AutoModelForCausalLM, t.AutoModel)\n"
        "options = {'trust_remote_code': True, 'revision': 'main', 'local_files_only': True}\n"
        "for folder in sys.argv[1:]:\n"
        "    assert not any(name.startswith('dist_attn') for name in sys.modules)\n"
        "    if not os.fork():\n"  # all that is not ours is loaded once
        "        print(*[type(auto.from_pretrained(folder, **options)).__name__ for auto in autos], flush=True)\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0\n"
    )
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    run = [sys.executable, "-c", code, str(write_small_folder(tmp_path / "m")), str(resolve_model_folder("writer-12m"))]
    done = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120, env=environment)
    brought = [line.split()[1:] for line in done.stdout.splitlines()]
    assert brought == 2 * [["DistAttnConfig", "DistAttnForCausalLM", "DistAttnModel"]]


@pytest.mark.parametrize(("name", "end"), [("books-6m", 4095), ("writer-12m", 8191)])
def test_the_shipped_models_load(name, end):
    """The shipped models' folders are ones that transformers knows, with an end token that pads; they write."""
    folder = resolve_model_folder(name)
    model = _load(folder)
    assert model.generation_config.pad_token_id == end
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == end
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)


def test_without_transformers_one_line_names_the_extra(monkeypatch):
    """Where transformers is missing, the import raises a MissingExtraError that says what to install."""
    for name in [name for name in sys.modules if name.startswith("dist_attn.hf")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError) as refused:
        import_module("dist_attn.hf")
    words = "dist_attn.hf needs transformers: in the checkout, run .venv/bin/pip install -e '.[hf]'"
    assert str(refused.value) == words
