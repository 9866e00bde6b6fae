"""What uploads are read with: forms, the headers of resumable uploads, ranges; exact, bounded, however they are cut."""

import random

import httpx
import pytest
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.http.exchange import byte_range
from dist_attn_service.uploads.multipart import HEAD_BYTES, FieldStart, FormParser, boundary_of
from dist_attn_service.uploads.tus import parse_count, parse_metadata

from tests.fuzz.upload_requests import cut_somewhere, run, whole_form


def form(head: str, data: bytes = b"x", boundary: str = "b") -> bytes:
    """A form of one field."""
    return f"--{boundary}\r\n{head}\r\n\r\n".encode() + data + f"\r\n--{boundary}--\r\n".encode()


NAMED = 'Content-Disposition: form-data; name="a"'


def test_a_form_is_read_the_same_wherever_it_is_cut() -> None:
    """Fields, names and bytes are those that a client sent, also bytes that look like boundaries."""
    data = b"--\r\n--" + bytes(range(256)) + b"\r\n--almost\r\n"
    request = httpx.Request(
        "POST",
        "http://x",
        data={"purpose": "user_data", "empty": ""},
        files={"file": ('a "name" ü.txt', data, "text/plain"), "none": ("n", b"")},
    )
    body, boundary = request.read(), boundary_of(request.headers["content-type"])
    fields = whole_form([body], boundary)
    assert [(start.name, start.filename, bytes(value)) for start, value in fields] == [
        ("purpose", None, b"user_data"),
        ("empty", None, b""),
        ("file", 'a "name" ü.txt', data),
        ("none", "n", b""),
    ]
    rng = random.Random(0)
    for _ in range(200):
        assert whole_form(cut_somewhere(body, rng), boundary) == fields
    assert whole_form([body[i : i + 1] for i in range(len(body))], boundary) == fields


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"no boundary",
        b"--c\r\n",
        b"--bX\r\n",
        b"--b\r\n\r\n\r\n\r\n--b--\r\n",
        form(NAMED)[:-6],
        form(NAMED) + b"more",
        form("Content-Disposition: form-data"),
        form("Content-Disposition: attachment; name=a"),
        form('Content-Disposition: form-data; name="a"; name="b"'),
        form('Content-Disposition: form-data; name="a" filename="b"'),
        form(f"{NAMED}\r\nContent-Disposition: form-data; name=b"),
        form(f"{NAMED}\r\nContent-Transfer-Encoding: base64"),
        form(f"{NAMED}\r\nno header"),
        form(f"{NAMED}\r\nX: \x01"),
        form(f"{NAMED}\r\nX: {'a' * HEAD_BYTES}"),
        form("A: \xff").replace("\xff".encode(), b"\xff"),
        form(NAMED)[:-4] * 33,
    ],
)
def test_what_is_no_form_is_refused(body: bytes) -> None:
    """Every kind of damage is a 400 in words, and a form that does not end is none."""
    with pytest.raises(ServiceError, match="multipart") as refused:
        whole_form([body], b"b")
    assert refused.value.status == 400


def test_a_parser_holds_little() -> None:
    """Of a field of any size no more stays in the parser than a boundary."""
    parser = FormParser(b"b" * 70)
    begin = parser.push(b"--" + b"b" * 70 + b"\r\n" + NAMED.encode() + b"\r\n\r\n")
    assert isinstance(begin[0], FieldStart)
    given = sum(len(e) for _ in range(50) for e in parser.push(bytes(100_000)) if isinstance(e, bytes))
    assert 0 <= 5_000_000 - given < 80


@pytest.mark.parametrize(
    "header", ["multipart/form-data", "m; boundary=", 'm; boundary=""', "m; boundary=" + "b" * 71, "m; boundary=ü"]
)
def test_a_boundary_is_asked_for(header: str) -> None:
    """A form without a boundary, or with one that RFC 2046 does not allow, is a 400."""
    with pytest.raises(ServiceError, match="boundary") as refused:
        boundary_of(header)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("header", "size", "expected"),
    [
        ("bytes=0-0", 5, (0, 1)),
        ("bytes=2-", 5, (2, 5)),
        ("bytes=2-100", 5, (2, 5)),
        ("bytes=-2", 5, (3, 5)),
        ("bytes=-100", 5, (0, 5)),
        ("Bytes=1-2", 5, (1, 3)),
        (None, 5, None),
        ("bytes=-", 5, None),
        ("bytes=3-2", 5, None),
        ("bytes=0-1,3-4", 5, None),
        ("rows=0-1", 5, None),
        ("bytes=a-b", 5, None),
    ],
)
def test_ranges(header: str | None, size: int, expected: tuple[int, int] | None) -> None:
    """One range of bytes is taken, cut to the file; what is none is ignored."""
    assert byte_range(header, size) == expected


@pytest.mark.parametrize(("header", "size"), [("bytes=5-", 5), ("bytes=-0", 5), ("bytes=0-", 0), ("bytes=9-10", 5)])
def test_a_range_beyond_the_file_is_refused(header: str, size: int) -> None:
    """Without a byte in it a range is a 416 that says how long the file is."""
    with pytest.raises(ServiceError) as refused:
        byte_range(header, size)
    assert (refused.value.status, refused.value.headers["content-range"]) == (416, f"bytes */{size}")


def test_metadata_and_counts_of_resumable_uploads() -> None:
    """Keys with base64 of UTF-8, keys alone, numbers in digits; anything else is a 400 that names the header."""
    assert parse_metadata("") == {}
    assert parse_metadata("filename w6R0LnR4dA==, empty , flag") == {"filename": "ät.txt", "empty": "", "flag": ""}
    for value in ("a b", "a YQ==,a YQ==", "ü YQ==", "a /w==", "a YQ== YQ==", "x" * 9000):
        with pytest.raises(ServiceError, match="Upload-Metadata"):
            parse_metadata(value)
    assert parse_count({"Upload-Offset": "007"}, "Upload-Offset") == 7
    for value in ("", "-1", "1.0", "٣", "9" * 17, "9007199254740993"):
        with pytest.raises(ServiceError, match="Upload-Offset"):
            parse_count({"Upload-Offset": value}, "Upload-Offset")
    with pytest.raises(ServiceError, match="missing"):
        parse_count({}, "Upload-Offset")


def test_spoilt_requests_are_refused_or_read() -> None:
    """Thousands of spoilt forms, headers, ranges and JSON bodies: each is read, or refused with a 4xx in words."""
    outcomes = run(3000, seed=1)
    assert sum(outcomes.values()) == 3000
    assert outcomes["read"] > 300 and len(outcomes) > 10
