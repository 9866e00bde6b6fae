"""The chat template of a model folder: messages in, the prompt out, made by a process with bounds of its own."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, final

import msgspec

from dist_attn.errors import ModelFolderError
from dist_attn.shipped.folder_files import find_json_object, read_file
from dist_attn.text.hugging_face import CONFIG_NAME, SPECIAL_NAME
from dist_attn.text.whole_text import content_of
from dist_attn_service.base.errors import Code, ServiceError, retry_after
from dist_attn_service.completions.template_program import LENGTH_BYTES, MOST_CHARACTERS, MOST_SECONDS
from dist_attn_service.completions.tool_calls import CallForm, form_told_by

__all__ = ["ChatTemplate", "TemplateRefusal"]

TEMPLATE_NAME = "chat_template.jinja"
TOOLS_NAME = "tool_use"
"""The template that takes the place of the default one where there are tools."""
MOST_SOURCE_BYTES = 1 << 18
MOST_ANSWER_BYTES = 8 * MOST_CHARACTERS
EXIT_SECONDS = 1.0
"""The time that a process has to end by itself."""
START_SECONDS = 60.0
"""The time that a start may take on a busy machine; usually it takes a tenth of a second."""
READ_BYTES = 1 << 20  # at a time
PROCESSES = 2
"""The most of one template: a second one runs while the first is at work, so that no chat waits for a long one."""


class TemplateRefusal(Exception):
    """The template does not take these messages; the text says why."""


class _Answer(msgspec.Struct, frozen=True):
    """An answer of the program: one of the first three members; with `ends` its process ends after it."""

    asks_for: dict[str, frozenset[str]] = {}
    parts: list[str | int] = []
    refusal: str = ""
    ends: bool = False


@final
class ChatTemplate:
    """The templates of a folder, and the processes that are warm for them; of one event loop.

    A client's text never becomes a special token, whatever the template does with it: traced_text.py follows which
    characters come from the template, and the text of a special token counts only if all of it does.
    """

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._asks_for: dict[str, frozenset[str]] = {}
        self._running: set[Process] = set()
        self._idle: list[Process] = []
        self._places = asyncio.Semaphore(PROCESSES)

    @classmethod
    async def started(cls, folder: Path, special: Mapping[str, int]) -> Self | None:
        """The template of chat_template.jinja, else of tokenizer_config.json; None where there is neither.

        `special` has the ids of special tokens by their text.
        Raises: ModelFolderError for a template that cannot be read.
        """
        source = _read_source(folder, special)
        if source is None:
            return None
        made = cls(source)
        try:
            made._idle.append(await made._start())
        except (TemplateRefusal, ServiceError) as error:
            raise ModelFolderError(f"the chat template of {folder} cannot be read: {error}") from None
        return made

    async def close(self) -> None:
        """End the processes."""
        for process in list(self._running):
            await self._end(process)

    @property
    def call_form(self) -> CallForm | None:
        """The form in which the template has calls of tools written; None for one that is not known here."""
        return form_told_by(self._source)

    def asks_for(self, *, tools: bool) -> frozenset[str]:
        """The values that the template for a chat with or without tools looks at."""
        return self._asks_for[self._name(tools)]

    async def render(self, messages: Sequence[Mapping[str, Any]], /, **more: Any) -> list[str | int]:
        """Render the prompt up to where the assistant begins: texts, and the ids of special tokens between them.

        `more` has further values for the template, such as `tools` and `documents`.

        Raises: TemplateRefusal where the template does not take these messages, or not with so much time and memory;
            ServiceError while others keep its processes at work.
        """
        told = {"messages": messages, "add_generation_prompt": True, **more}
        try:
            message = msgspec.json.encode({"name": self._name("tools" in more), "told": told})
        except RecursionError:
            raise TemplateRefusal("values lie too deep within each other") from None
        try:
            await asyncio.wait_for(self._places.acquire(), MOST_SECONDS)
        except TimeoutError:
            raise _overloaded("other chats keep the model's chat template at work; try again") from None
        try:
            answer = await self._ask(message)
        finally:
            self._places.release()
        if answer.refusal:
            raise TemplateRefusal(answer.refusal)
        return answer.parts

    def _name(self, tools: bool) -> str:
        return TOOLS_NAME if tools and TOOLS_NAME in self._asks_for else "default"

    async def _ask(self, message: bytes) -> _Answer:
        while self._idle and self._idle[-1].returncode is not None:
            await self._end(self._idle.pop())  # it was ended from outside
        process = self._idle.pop() if self._idle else await self._start()
        answer = await self._exchange(process, message, MOST_SECONDS)
        if answer.ends:
            await self._end(process, EXIT_SECONDS)
        else:
            self._idle.append(process)
        return answer

    async def _start(self) -> Process:
        """Start a process that has read the template.

        Raises: TemplateRefusal where it cannot; ServiceError where there can be no process.
        """
        program = [sys.executable, "-m", "dist_attn_service.completions.template_program"]
        tied = [sys.executable, "-m", "dist_attn.rank_link.tether", str(os.getpid()), *program]
        start = partial(asyncio.create_subprocess_exec, stdin=PIPE, stdout=PIPE, limit=READ_BYTES)
        try:  # a session of its own: a Ctrl-C in the terminal is for the service alone, which lets chats end
            process = await start(*tied, start_new_session=True)
        except OSError as error:
            raise _overloaded(f"there can be no process for the model's chat template: {error.strerror}") from None
        self._running.add(process)
        answer = await self._exchange(process, self._source, START_SECONDS)
        if answer.refusal:
            await self._end(process)
            raise TemplateRefusal(answer.refusal)
        self._asks_for = answer.asks_for
        return process

    async def _exchange(self, process: Process, message: bytes, seconds: float) -> _Answer:
        """Send a message and return the answer; a process that does not answer is ended.

        Raises: TemplateRefusal that says why there is no answer.
        """
        assert process.stdin is not None and process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                process.stdin.writelines([len(message).to_bytes(LENGTH_BYTES, "little"), message])
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "little")
                data = await process.stdout.readexactly(min(size, MOST_ANSWER_BYTES))
            return msgspec.json.decode(data, type=_Answer)
        except TimeoutError:
            await self._end(process)
            raise TemplateRefusal(f"it is not done in {seconds:g} seconds") from None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            await self._end(process, EXIT_SECONDS)
            raise TemplateRefusal(f"its process ended before it was done ({_exit(process)})") from None
        except asyncio.CancelledError:
            await self._end(process)
            raise

    async def _end(self, process: Process, patience: float = 0) -> None:
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), patience)
        finally:  # also where the request is cancelled meanwhile
            with suppress(ProcessLookupError):
                process.kill()
            self._running.discard(process)
            await process.wait()


def _exit(process: Process) -> str:
    code = process.returncode or 0
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _overloaded(words: str) -> ServiceError:
    return ServiceError(words, code=Code.OVERLOADED, headers=retry_after(MOST_SECONDS))


def _read_source(folder: Path, special: Mapping[str, int]) -> bytes | None:
    """The first message to the program; None for a folder without a template."""
    about: dict[str, Any] = {}
    for name in (SPECIAL_NAME, CONFIG_NAME):
        about |= find_json_object(folder / name) or {}
    path = folder / TEMPLATE_NAME
    sources = _by_name(about.get("chat_template"))
    if os.path.lexists(path):
        try:
            sources = {"default": read_file(path, MOST_SOURCE_BYTES).decode()}
        except UnicodeDecodeError as error:
            raise ModelFolderError(f"{path} cannot be read: {error}") from None
    if "default" not in sources:
        return None
    named = {name: content_of(value) for name, value in about.items() if name.endswith("_token")}
    if not about and len(special) == 1:  # a tokeniser of this project: its one special token ends a text
        named["eos_token"] = next(iter(special))
    names = {name: text for name, text in named.items() if text is not None}
    sources = {name: text for name, text in sources.items() if name in ("default", TOOLS_NAME)}
    if (size := sum(map(len, sources.values()))) > MOST_SOURCE_BYTES:
        raise ModelFolderError(
            f"the chat template of {folder} has {size:,} characters; needed are at most {MOST_SOURCE_BYTES:,}"
        )
    try:
        return msgspec.json.encode({"sources": sources, "names": names, "special": special})
    except UnicodeEncodeError:
        words = "the chat template, or a token that is named,"
        raise ModelFolderError(f"{folder}: {words} holds half of a surrogate pair; fetch it again") from None


def _by_name(value: Any) -> dict[str, str]:
    """Templates by their names; one without a name is called `default`."""
    found: dict[str, str] = {}
    for one in value if isinstance(value, list) else [{"name": "default", "template": value}]:
        match one:
            case {"name": str() as name, "template": str() as template}:
                found[name] = template
    return found
