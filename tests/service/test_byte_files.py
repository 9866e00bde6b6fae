"""Files that are opened beside the event loop, for callers that may be gone when they are open."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dist_attn_service.uploads.byte_files import ByteFolder
from dist_attn_service.uploads.ledger import Segment

from dist_attn.store.files import BlobFile, BlobFolder


def test_a_file_whose_reader_is_cancelled_while_it_opens_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread opens for a reader that was cancelled meanwhile is closed when it comes, not left to be found."""
    begun, go = threading.Event(), threading.Event()
    files: list[BlobFile] = []
    opened = BlobFolder.open

    def slow(folder: BlobFolder, name: str, flags: int = 0) -> BlobFile:
        begun.set()
        assert go.wait(60)
        files.append(opened(folder, name, flags))
        return files[0]

    async def read() -> None:
        with ThreadPoolExecutor(1) as threads:
            folder = ByteFolder(tmp_path, threads)
            async with folder.writing("aa") as writer:
                await writer.write(b"text")
                await writer.flush()
            monkeypatch.setattr(BlobFolder, "open", slow)
            pieces = folder.read([Segment("aa", 4)], 0, 4)
            task = asyncio.ensure_future(anext(pieces))
            await asyncio.to_thread(begun.wait, 30)
            task.cancel()
            await asyncio.sleep(0.1)
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [file.closed for file in files] == [True]

    asyncio.run(asyncio.wait_for(read(), 60))
