"""A million spoilt upload requests, or any other number: none may do anything but be read, or be refused with a 4xx.

    python -m tests.fuzz.upload_requests --inputs 1000000

Forms are read twice, cut at different places, and must come to the same. With --atheris the inputs are chosen by
coverage instead (needs the package atheris).
"""

import base64
import random
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable

from dist_attn_service.base.errors import ServiceError
from dist_attn_service.base.parsing import parse_json, parse_query
from dist_attn_service.http.exchange import byte_range
from dist_attn_service.schemas.stored import FileListOptions, UploadRequest
from dist_attn_service.uploads.multipart import FieldStart, FormParser, boundary_of
from dist_attn_service.uploads.tus import check_version, parse_count, parse_metadata

from tests.fuzz.running import main, spoil

__all__ = ["cut_somewhere", "run", "try_one", "whole_form"]

MEASURED = 0.01  # of the inputs are read with every allocation counted
BYTES_PER_BYTE, SLACK_BYTES = 40, 1 << 18  # what reading may allocate for each byte of input, and beside
BOUNDARY = b"----boundary-7MA4YWxk"
_HEAD = b'Content-Disposition: form-data; name="%s"'
FORM = b"".join(
    (
        b"--%b\r\n" % BOUNDARY,
        _HEAD % b"purpose" + b"\r\n\r\nuser_data\r\n",
        b"--%b\r\n" % BOUNDARY,
        _HEAD % b"file" + b'; filename="a \\"b\\" %22.txt"\r\nContent-Type: text/plain; charset="utf-8"\r\n\r\n',
        b"line\r\n--\r\n------boundary\r\nline\r\n",
        b"--%b\r\n" % BOUNDARY,
        _HEAD % b"expires_after[seconds]" + b"\r\n\r\n3600\r\n",
        b"--%b--\r\n" % BOUNDARY,
    )
)
CONTENT_TYPE = b'multipart/form-data; charset=utf-8; boundary="' + BOUNDARY + b'"'
METADATA = b"filename " + base64.b64encode("größe.txt".encode()) + b",purpose " + base64.b64encode(b"batch") + b",flag"
CREATE = (
    b'{"bytes": 9, "filename": "a.txt", "mime_type": "text/plain", "purpose": "batch", '
    b'"expires_after": {"anchor": "created_at", "seconds": 3600}}'
)


def whole_form(chunks: Iterable[bytes], boundary: bytes) -> list[tuple[FieldStart, bytearray]]:
    """The fields of a form that comes in these pieces.

    Raises: ServiceError when it is none.
    """
    parser, fields = FormParser(boundary), list[tuple[FieldStart, bytearray]]()
    for chunk in chunks:
        for event in parser.push(chunk):
            if isinstance(event, FieldStart):
                fields.append((event, bytearray()))
            else:
                fields[-1][1].extend(event)
    parser.finish()
    return fields


def cut_somewhere(data: bytes, rng: random.Random) -> list[bytes]:
    """The same bytes in up to six pieces, some of them perhaps empty."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def _form(data: bytes) -> None:
    cuts = random.Random(data)
    outcomes = [_outcome(lambda: whole_form(cut_somewhere(data, cuts), BOUNDARY)) for _ in range(2)]
    assert outcomes[0] == outcomes[1], f"cut elsewhere, it is {outcomes[1]!r}, not {outcomes[0]!r}"
    whole_form([data], BOUNDARY)


def _outcome(work: Callable[[], object]) -> object:
    try:
        return work()
    except ServiceError as error:
        return error.status


def _query(text: str) -> None:
    parse_query(
        [(name, value) for name, _, value in (pair.partition("=") for pair in text.split("&"))], FileListOptions
    )


def _headers(text: str) -> None:
    length, _, version = text.partition("|")
    parse_count({"Upload-Length": length}, "Upload-Length")
    check_version({"Tus-Resumable": version})


# A header reaches the service as latin-1.
READERS: tuple[tuple[bytes, Callable[[bytes], object]], ...] = (
    (FORM, _form),
    (CONTENT_TYPE, lambda data: boundary_of(data.decode("latin-1"))),
    (METADATA, lambda data: parse_metadata(data.decode("latin-1"))),
    (b"8388608|1.0.0", lambda data: _headers(data.decode("latin-1"))),
    (b"bytes=100-2000", lambda data: byte_range(data.decode("latin-1"), 1000)),
    (CREATE, lambda data: parse_json(data, UploadRequest)),
    (b"limit=5&order=asc&purpose=batch&after=file-1", lambda data: _query(data.decode("latin-1"))),
)


def try_one(data: bytes, read: Callable[[bytes], object]) -> ServiceError | None:
    """Read these bytes; the refusal if there is one.

    Raises: AssertionError for a refusal that is no 4xx in words, or that no answer could carry.
    """
    try:
        read(data)
    except ServiceError as error:
        assert 400 <= error.status < 500 and len(error.message) > 10
        error.body("req-1")
        for value in error.headers.values():
            value.encode("latin-1")
        return error
    return None


def run(inputs: int, seed: int) -> Counter[str]:
    """How many inputs were read, and how many refused, by the first words of the refusal.

    Raises: AssertionError for an allocation out of proportion, and whatever a parser raises that it must not.
    """
    rng, outcomes = random.Random(seed), Counter[str]()
    for _ in range(inputs):
        sound, read = rng.choice(READERS)
        data = spoil(sound, rng)
        measured = rng.random() < MEASURED
        if measured:
            tracemalloc.start()
        refusal = try_one(data, read)
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= BYTES_PER_BYTE * len(data) + SLACK_BYTES, f"{peak} bytes for {len(data)}"
        outcomes["read" if refusal is None else " ".join(re.sub("'.*?'|[0-9]+", "N", str(refusal)).split()[:7])] += 1
    return outcomes


def _by_coverage(data: bytes) -> None:
    if data:
        try_one(data[1:], READERS[data[0] % len(READERS)][1])


if __name__ == "__main__":
    main(
        __doc__,
        run,
        _by_coverage,
        ["dist_attn_service.uploads", "dist_attn_service.base.parsing", "dist_attn_service.schemas.stored"],
    )
