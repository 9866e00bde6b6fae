"""Chat templates outside of a service."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dist_attn_service.completions.chat_template import ChatTemplate


@asynccontextmanager
async def warm(folder: Path, special: Mapping[str, int] | None = None) -> AsyncIterator[ChatTemplate]:
    """The template of a folder, which has one."""
    template = await ChatTemplate.started(folder, special or {})
    assert template is not None
    try:
        yield template
    finally:
        await template.close()


def prompt(
    folder: Path, special: Mapping[str, int] | None, messages: Sequence[Mapping[str, Any]], **more: Any
) -> list[str | int]:
    """What the folder's template makes of the messages."""

    async def work() -> list[str | int]:
        async with warm(folder, special) as template:
            return await template.render(messages, **more)

    return asyncio.run(work())


def read(folder: Path, special: Mapping[str, int] | None = None) -> dict[bool, frozenset[str]] | None:
    """What the folder's templates without and with tools look at; None where there is none."""

    async def work() -> dict[bool, frozenset[str]] | None:
        template = await ChatTemplate.started(folder, special or {})
        if template is None:
            return None
        await template.close()
        return {tools: template.asks_for(tools=tools) for tools in (False, True)}

    return asyncio.run(work())
