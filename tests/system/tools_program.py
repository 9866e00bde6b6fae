"""Programs of users, one for each of their tools: `python tools_program.py TOOL URL`. Only the tool has to be there."""

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

KEY = "none"
CHAT: Any = [{"role": "user", "content": "Which town?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"town": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["town", "warm"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "weather", "description": "The weather of a town", "parameters": SCHEMA}


def _place() -> Any:
    from typing import Literal

    from pydantic import BaseModel

    class Place(BaseModel):
        """A town, and whether it is warm."""

        town: Literal["Oslo", "Rome"]
        warm: bool

    return Place


def openai(url: str) -> None:
    from openai import OpenAI

    client, place = OpenAI(base_url=f"{url}/v1", api_key=KEY), _place()
    assert client.completions.create(model="tiny", prompt="Which town?", max_tokens=9).choices[0].finish_reason
    parsed: Any = client.chat.completions.parse(model="tiny", messages=CHAT, response_format=place, max_tokens=200)
    assert parsed.choices[0].message.parsed.town in ("Oslo", "Rome")
    tools: Any = [{"type": "function", "function": FUNCTION}]
    said: Any = client.chat.completions.create(model="tiny", messages=CHAT, tools=tools, tool_choice="required")
    assert json.loads(said.choices[0].message.tool_calls[0].function.arguments)["town"] in ("Oslo", "Rome")
    told: Any = client.responses.parse(model="tiny", input="Which town?", text_format=place, max_output_tokens=200)
    assert told.output_parsed.town in ("Oslo", "Rome")
    assert client.responses.create(model="tiny", input="Which town?", max_output_tokens=9).output
    with client.responses.stream(model="tiny", input="Which town?", max_output_tokens=9) as stream:
        assert [event.type for event in stream][-1] in ("response.completed", "response.incomplete")
    data = client.embeddings.create(model="minilm-stream", input=["a ship", ""], dimensions=64).data
    assert len(data[0].embedding) == 64 and abs(sum(x * x for x in data[0].embedding) - 1) < 1e-5
    assert client.files.content(client.files.create(file=b"a ship", purpose="user_data").id).read() == b"a ship"


def instructor(url: str) -> None:
    import instructor as library
    from openai import OpenAI

    for mode in (library.Mode.TOOLS, library.Mode.JSON_SCHEMA):
        client: Any = library.from_openai(OpenAI(base_url=f"{url}/v1", api_key=KEY), mode=mode)
        made = client.chat.completions.create(model="tiny", messages=CHAT, response_model=_place(), max_tokens=200)
        assert made.town in ("Oslo", "Rome")


def pydantic_ai(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=KEY))
    assert Agent(model, model_settings={"max_tokens": 9}).run_sync("Which town?").output
    made: Any = Agent(model, output_type=_place()).run_sync("Which town?").output
    assert made.town in ("Oslo", "Rome")


def langchain(url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    where: Any = {"base_url": f"{url}/v1", "api_key": KEY}
    chat = ChatOpenAI(model="tiny", max_tokens=200, **where)
    made: Any = chat.with_structured_output(_place()).invoke("Which town?")
    assert made.town in ("Oslo", "Rome")
    called = chat.bind_tools([FUNCTION], tool_choice="any").invoke("Which town?")
    assert called.tool_calls[0]["args"]["town"] in ("Oslo", "Rome")
    assert list(chat.stream("Which town?"))
    vectors = OpenAIEmbeddings(model="minilm-stream", check_embedding_ctx_length=False, dimensions=64, **where)
    assert len(vectors.embed_query("a ship")) == 64


def llama_index(url: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(model="tiny", api_base=f"{url}/v1", api_key=KEY, is_chat_model=True, max_tokens=9)
    assert llm.complete("Which town?").raw and llm.chat([ChatMessage("Which town?")]).raw
    vectors = TextEmbeddingsInference(model_name="minilm-stream", base_url=url)
    assert len(vectors.get_text_embedding("a ship")) == 384


def cohere(url: str) -> None:
    from cohere import ClientV2

    client = ClientV2(api_key=KEY, base_url=url)
    asked: Any = {"model": "minilm-stream", "input_type": "search_query", "embedding_types": ["float", "base64"]}
    told = client.embed(texts=["a ship"], **asked).embeddings
    assert told.float_ is not None and len(told.float_[0]) == 384 and told.base64
    ranked = client.rerank(model="minilm-stream", query="a ship", documents=["a horse", "a boat at sea"])
    assert ranked.results[0].index == 1


def litellm(url: str) -> None:
    import litellm as library

    where: Any = {"api_base": f"{url}/v1", "api_key": KEY}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    said: Any = library.completion("openai/tiny", messages=CHAT, max_tokens=200, response_format=form, **where)
    assert json.loads(said.choices[0].message.content)["town"] in ("Oslo", "Rome")
    told: Any = library.responses(model="openai/tiny", input="Which town?", max_output_tokens=9, **where)
    assert told.output
    library.embedding("openai/minilm-stream", input=["a ship"], **where)
    for name, base in (("cohere", f"{url}/v2/rerank"), ("jina_ai", f"{url}/v1"), ("hosted_vllm", url)):
        asked: Any = {"api_base": base, "api_key": KEY, "documents": ["a horse", "a boat at sea"]}
        ranked: Any = library.rerank(f"{name}/minilm-stream", "a ship", **asked)
        assert ranked.results[0]["index"] == 1


def haystack(url: str) -> None:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    key, options = Secret.from_token(KEY), {"max_tokens": 9}
    chat = OpenAIChatGenerator(model="tiny", api_base_url=f"{url}/v1", api_key=key, generation_kwargs=options)
    assert chat.run([ChatMessage.from_user("Which town?")])["replies"]
    embedder = OpenAITextEmbedder(model="minilm-stream", api_base_url=f"{url}/v1", api_key=key)
    assert len(embedder.run("a ship")["embedding"]) == 384


def lm_eval(url: str) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(base_url=f"{url}/v1/completions", model="tiny", tokenizer=os.environ["TOOLS_MODEL"])
    asked = [Instance("loglikelihood", {}, ("Which town? ", end), at) for at, end in enumerate(("Rome", "Oslo"))]
    scores = model.loglikelihood(asked)
    assert len(scores) == 2 and all(score < 0 for score, _ in scores)
    assert model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("Which town? Rome",), 0)])[0] < 0


def tuspy(url: str) -> None:
    from tusclient.client import TusClient

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "book.txt")
        path.write_text("It was a dark night. " * 1000)
        client = TusClient(f"{url}/v1/uploads")
        begun = client.uploader(str(path), chunk_size=8192, metadata={"filename": "book.txt"})
        begun.upload_chunk()
        resumed = client.uploader(str(path), chunk_size=8192, url=begun.url)
        assert resumed.offset == 8192
        resumed.upload()
        assert resumed.offset == path.stat().st_size


def sentence_transformers(url: str) -> None:
    import urllib.request

    from sentence_transformers import SentenceTransformer

    texts = ["a ship", "", "It was a dark night. " * 200]
    model = SentenceTransformer(os.environ["TOOLS_ENCODER"], device="cpu", trust_remote_code=True)
    body = json.dumps({"model": "minilm-stream", "input": texts}).encode()
    asked = urllib.request.Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked) as answer:
        served = [one["embedding"] for one in json.load(answer)["data"]]
    assert abs(model.encode(texts) - served).max() < 1e-6


if __name__ == "__main__":
    gc.disable()  # half of the time went to looking for garbage in what a package loads
    tool, at = sys.argv[1:]
    sys.path.pop(0)  # a function here has the name of its tool's package
    globals()[tool](at)
    gc.freeze()
    print("as it should be")
