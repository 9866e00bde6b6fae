"""What a user of the official client does, for any version of it: `python openai_program.py URL KEY`.

It runs in an environment that holds nothing but that client, so it imports nothing of ours.
"""

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import openai


@contextmanager
def raises(kind: type[Exception], word: str) -> Iterator[None]:
    """The block must raise that error, with that word in it."""
    try:
        yield
    except kind as error:
        assert word in str(error), error
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def complete(client: openai.OpenAI, model: str) -> None:
    """Whole completions: one, several, with log-probabilities, with a stop string, with the prompt before them."""
    options = {"model": model, "prompt": "It was", "max_tokens": 8, "seed": 3}
    one = client.completions.create(**options)
    assert one.object == "text_completion" and one.usage.total_tokens == one.usage.prompt_tokens + 8
    assert one.choices[0].finish_reason == "length"
    several = client.completions.create(**{**options, "prompt": ["It was", "Call me"]}, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == one.choices[0].text
    told = client.completions.create(**options, logprobs=2).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 8
    stop = one.choices[0].text[2]
    cut = client.completions.create(**options, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop" and stop not in cut.text
    assert client.completions.create(**options, echo=True).choices[0].text == "It was" + one.choices[0].text
    scores = client.completions.create(**{**options, "max_tokens": 0}, echo=True, logprobs=2).choices[0]
    assert scores.text == "It was" and scores.finish_reason == "length"
    assert scores.logprobs.token_logprobs[0] is None and "".join(scores.logprobs.tokens) == "It was"
    assert all(value < 0 for value in scores.logprobs.token_logprobs[1:])
    best = client.completions.create(**options, best_of=3, presence_penalty=1, frequency_penalty=0.5)
    assert len(best.choices) == 1 and best.usage.completion_tokens >= 8
    ruled_out = client.completions.create(**{**options, "temperature": 0}, logit_bias={"97": -100, "98": 2})
    assert ruled_out.choices[0].finish_reason in ("length", "stop")


def stream(client: openai.OpenAI, model: str) -> None:
    """Streams, with usage, of several choices, and over pings."""
    options = {"model": model, "prompt": "It was", "max_tokens": 8, "seed": 3}
    whole = client.completions.create(**options, n=2)
    texts, usage = ["", ""], None
    for chunk in client.completions.create(**options, n=2, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert usage.completion_tokens == 16


def embed(client: openai.OpenAI, model: str) -> None:
    """Embeddings as the client asks for them by itself (base64) and as numbers."""
    packed = client.embeddings.create(model=model, input=["one text", "another"])
    numbers = client.embeddings.create(model=model, input=["one text", "another"], encoding_format="float")
    for one, other in zip(packed.data, numbers.data, strict=True):
        assert list(one.embedding) == [struct.unpack("<f", struct.pack("<f", value))[0] for value in other.embedding]
    assert packed.usage.prompt_tokens == numbers.usage.prompt_tokens > 0


def fail(client: openai.OpenAI, model: str) -> None:
    """Errors are the client's own kinds, with code, parameter and request id."""
    with raises(openai.NotFoundError, "not served here"):
        client.completions.create(model="another", prompt="a")
    with raises(openai.BadRequestError, "suffix"):
        client.completions.create(model=model, prompt="a", suffix="b")
    with raises(openai.BadRequestError, "chat_template.jinja"):
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "a"}])
    with raises(openai.BadRequestError, "empty"):
        client.embeddings.create(model=model, input="")
    try:
        client.completions.create(model=model, prompt="a", max_tokens=0)
    except openai.BadRequestError as error:
        assert (error.code, error.param) == ("invalid_value", "max_tokens") and error.request_id


def keep_files(client: openai.OpenAI) -> None:
    """Files: sent, listed, read, deleted."""
    data = bytes(range(256)) * 1000
    small = client.files.create(file=("small.txt", data), purpose="user_data")
    assert client.files.retrieve(small.id).bytes == len(data)
    large = client.files.create(file=("large.bin", data * 4), purpose="batch")
    assert {file.id for file in client.files.list(limit=1)} == {small.id, large.id}
    for file, sent in ((small, data), (large, data * 4)):
        assert client.files.content(file.id).read() == sent
        assert client.files.delete(file.id).deleted
    with raises(openai.NotFoundError, "no file"):
        client.files.content(small.id)


def main(url: str, key: str) -> None:
    """Run all of it over one client, whose connections are kept."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) as client:
        model = client.models.list().data[0].id
        assert client.models.retrieve(model).id == model
        for part in (complete, stream, embed, fail):
            part(client, model)
        keep_files(client)
    print(
        f"openai {openai.__version__}: models, completions, streams, embeddings, errors and files are as they should be"
    )


if __name__ == "__main__":
    main(*sys.argv[1:3])
