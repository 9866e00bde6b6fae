"""A client of sessions that says what an append came to."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

__all__ = ["Appended", "SessionClient"]


@dataclass(frozen=True)
class Appended:
    """The last line of an append."""

    session: str
    start: int
    position: int
    tokens: int
    checkpoints: list[int]
    restored_position: int
    recomputed_tokens: int
    bit_exact: bool
    reason: str
    replayed: bool


@dataclass(frozen=True)
class SessionClient:
    """Talks to one service, with a key or without; every request on a connection of its own."""

    url: str
    key: str = ""
    seconds: float = 20.0

    def request(
        self, method: str, path: str, *, headers: dict[str, str] | None = None, **options: Any
    ) -> httpx.Response:
        """The answer to one request."""
        own = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.request(
            method, self.url + path, headers={**own, **(headers or {})}, timeout=self.seconds, **options
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        """GET."""
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        """POST."""
        return self.request("POST", path, **options)

    def put(self, path: str, **options: Any) -> httpx.Response:
        """PUT."""
        return self.request("PUT", path, **options)

    def delete(self, path: str) -> httpx.Response:
        """DELETE."""
        return self.request("DELETE", path)

    def state(self, session: str, **query: Any) -> httpx.Response:
        """The newest state of a session."""
        return self.get(f"/v1/sessions/{session}/state", params=query)

    def make(self, **body: Any) -> str:
        """The id of a new session."""
        answer = self.post("/v1/sessions", json=body)
        assert answer.status_code == 201, answer.text
        name: str = answer.json()["id"]
        return name

    def append_lines(self, session: str, text: Any, key: str = "", **query: Any) -> list[dict[str, Any]]:
        """All lines of an append, or its problem document."""
        headers = {"content-type": "text/plain", **({"idempotency-key": key} if key else {})}
        answer = self.post(f"/v1/sessions/{session}/append", content=text, headers=headers, params=query)
        return [json.loads(line) for line in answer.text.splitlines()]

    def append(self, session: str, text: Any, key: str = "", **query: Any) -> Appended:
        """Append a text and expect it to go well."""
        last = self.append_lines(session, text, key, **query)[-1]
        assert last.pop("object", None) == "session.append", last
        assert last.pop("model")
        return Appended(**last)
