"""Files that are opened beside the event loop, for callers that may be gone when they are open."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import pytest
from dist_attn_service.uploads import byte_files
from dist_attn_service.uploads.byte_files import ByteFolder
from dist_attn_service.uploads.ledger import Segment


def test_a_file_whose_reader_is_cancelled_while_it_opens_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread opens for a reader that was cancelled meanwhile is closed when it comes, not left to be found."""
    begun, go, closed = threading.Event(), threading.Event(), threading.Event()

    class SlowFile(FileIO):
        def __init__(self, path: Path) -> None:
            begun.set()
            assert go.wait(60)
            super().__init__(path)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr(byte_files, "FileIO", SlowFile)

    async def read() -> None:
        with ThreadPoolExecutor(1) as threads:
            folder = ByteFolder(tmp_path, threads)
            async with folder.writing("aa") as writer:
                await writer.write(b"text")
                await writer.flush()
            pieces = folder.read([Segment("aa", 4)], 0, 4)
            task = asyncio.ensure_future(anext(pieces))
            await asyncio.to_thread(begun.wait, 30)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go.set()
            assert await asyncio.to_thread(closed.wait, 30)

    asyncio.run(asyncio.wait_for(read(), 60))
