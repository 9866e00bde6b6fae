"""Requests whose answers are compared by their SHA-256: what is measured while a service is disturbed."""

import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx

__all__ = ["Stream", "streams_of"]


@dataclass(frozen=True)
class Stream:
    """One request: an encoding of `text`, or a completion of it with `max_tokens`."""

    name: str
    text: str
    max_tokens: int = 0

    async def digest(self, http: httpx.AsyncClient, came: Callable[[], None] = lambda: None) -> str:
        """SHA-256 of all rows, or of all text that was drawn; `came` is called for each row and piece of text.

        Raises: RuntimeError for an answer that ends without its end.
        """
        made = hashlib.sha256()
        if self.max_tokens:
            whole = False
            async for line in self._completion(http):
                if line == "data: [DONE]":
                    whole = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise RuntimeError(f"{self.name}: {event['error']}")
                    made.update(event["choices"][0]["text"].encode())
                    came()
        else:
            whole = False
            async for line in self._encoding(http):
                row = json.loads(line)
                if row.get("object") == "error":
                    raise RuntimeError(f"{self.name}: {row['error']}")
                whole = row.get("object") == "encoding.summary"
                made.update(b"" if whole else line.encode())
                came()
        if not whole:
            raise RuntimeError(f"{self.name}: the answer ended before its end")
        return made.hexdigest()

    async def _completion(self, http: httpx.AsyncClient) -> AsyncIterator[str]:
        body = {"prompt": self.text, "max_tokens": self.max_tokens, "seed": 7, "temperature": 0.8, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                yield line

    async def _encoding(self, http: httpx.AsyncClient) -> AsyncIterator[str]:
        headers = {"content-type": "text/plain"}
        async with http.stream("POST", "/v1/encodings", content=self.text.encode(), headers=headers) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                yield line


def streams_of(book: str, count: int, tokens: int) -> list[Stream]:
    """Half of them encodings of parts of the book, half completions of its beginnings."""
    size = len(book) // max(1, count)
    encodings = [Stream(f"encoding {n}", book[n * size : (n + 1) * size]) for n in range(count // 2)]
    completions = [
        Stream(f"completion {n}", book[n * size : n * size + 200 + 1500 * n], tokens) for n in range(count // 2, count)
    ]
    return [*encodings, *completions]
