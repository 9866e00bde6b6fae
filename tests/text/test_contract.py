"""One contract for every tokeniser."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.errors import TokenError
from dist_attn.text import TAIL_BYTES, ByteTokeniser, ForeignTokeniser, IncrementalDecoder, Tokeniser, load_tokeniser
from tests.support.tokenisers import PROSE, foreign_bpe, llama_bpe, sentence_piece_bpe, small_bpe, unigram

MAKERS: list[Callable[[], Tokeniser]] = [ByteTokeniser, small_bpe, foreign_bpe, llama_bpe, sentence_piece_bpe, unigram]
every_tokeniser = pytest.mark.parametrize(
    "make", MAKERS, ids=["bytes", "bpe", "gpt2", "llama", "sentencepiece", "unigram"]
)

# Long runs of one kind are what the caps of the cut are for; slices of prose bring real words and quotes.
RUNS = st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=4), st.integers(1, 120))
SLICES = st.builds(lambda a, b: PROSE.encode()[a : a + b], st.integers(0, 400), st.integers(0, 200))
TEXTS = st.lists(st.one_of(st.binary(max_size=80), RUNS, SLICES), max_size=5).map(b"".join)


def encode_in_parts(tokeniser: Tokeniser, parts: list[bytes]) -> tuple[np.ndarray, int]:
    """The tokens of a stream that arrives in these parts, and the longest tail that was carried."""
    tail, longest, tokens = b"", 0, []
    for part in parts:
        tail += part
        found, consumed = tokeniser.encode_piece(tail, final=False)
        tail = tail[consumed:]
        tokens.append(found)
        longest = max(longest, len(tail))
    found, consumed = tokeniser.encode_piece(tail, final=True)
    assert consumed == len(tail)
    return np.concatenate([*tokens, found]), longest


@every_tokeniser
@given(data=TEXTS, cuts=st.lists(st.integers(0, 1000), max_size=12))
def test_split_anywhere(make: Callable[[], Tokeniser], data: bytes, cuts: list[int]) -> None:
    """However a stream is split, its tokens are those of the whole, and at most TAIL_BYTES are carried."""
    edges = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    parts = [data[a:b] for a, b in pairwise(edges)]
    tokens, longest = encode_in_parts(make(), parts)
    np.testing.assert_array_equal(tokens, make().encode(data))
    assert longest <= TAIL_BYTES


@every_tokeniser
def test_byte_by_byte(make: Callable[[], Tokeniser]) -> None:
    """Prose that arrives one byte at a time gives the tokens of the whole."""
    data = PROSE.encode()
    tokens, _ = encode_in_parts(make(), [data[i : i + 1] for i in range(len(data))])
    np.testing.assert_array_equal(tokens, make().encode(data))


@every_tokeniser
@given(data=TEXTS)
def test_round_trip(make: Callable[[], Tokeniser], data: bytes) -> None:
    """Any bytes come back from their tokens, and the tokens' byte lengths add up."""
    tokeniser = make()
    tokens = tokeniser.encode(data)
    assert tokens.dtype == np.int32
    assert tokeniser.decode(tokens) == data
    lengths = tokeniser.byte_lengths(tokens)
    assert [len(tokeniser.decode([int(t)])) for t in tokens] == lengths.tolist()
    assert lengths.sum() == len(data)


@every_tokeniser
def test_larger_than_a_block(make: Callable[[], Tokeniser]) -> None:
    """A text of several internal blocks gives the same tokens whole and in parts, whatever kind of bytes holds it."""
    data = PROSE.encode() * 80 + b"x" * 70_000
    tokeniser = make()
    whole = tokeniser.encode(data)
    parts, _ = encode_in_parts(tokeniser, [data[i : i + 9_973] for i in range(0, len(data), 9_973)])
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_array_equal(tokeniser.encode(bytearray(data)), whole)
    np.testing.assert_array_equal(tokeniser.encode(memoryview(data)), whole)


@every_tokeniser
def test_empty(make: Callable[[], Tokeniser]) -> None:
    """No bytes are no tokens, whether the stream has ended or not."""
    for final in (False, True):
        tokens, consumed = make().encode_piece(b"", final=final)
        assert (tokens.shape, tokens.dtype, consumed) == ((0,), np.int32, 0)
    assert make().decode([]) == b""
    assert make().byte_lengths(np.empty(0, dtype=np.int32)).shape == (0,)


@every_tokeniser
def test_end_token(make: Callable[[], Tokeniser]) -> None:
    """The end token stands for no bytes, and no text turns into it; in our own tokenisers it is the highest id."""
    tokeniser = make()
    if not isinstance(tokeniser, ForeignTokeniser):
        assert tokeniser.end_token == tokeniser.vocab_size - 1
    assert tokeniser.end_token is not None
    assert tokeniser.decode([tokeniser.end_token]) == b""
    assert tokeniser.byte_lengths([tokeniser.end_token]).tolist() == [0]
    assert tokeniser.end_token not in tokeniser.encode(b"a<|end|>b<|endoftext|>")


@every_tokeniser
@pytest.mark.parametrize("offset", [0, 5, -100_000])
def test_unknown_id(make: Callable[[], Tokeniser], offset: int) -> None:
    """An id outside the vocabulary is refused with its value and the range."""
    tokeniser = make()
    bad = tokeniser.vocab_size + offset
    for refuse in (tokeniser.decode, tokeniser.byte_lengths):
        with pytest.raises(TokenError, match=f"token id {bad} .* 0 to {tokeniser.vocab_size - 1}"):
            refuse([0, bad])


@every_tokeniser
def test_not_bytes(make: Callable[[], Tokeniser]) -> None:
    """Text, wide memory views and rows of fractions are refused in words."""
    with pytest.raises(TokenError, match="takes bytes; given was str"):
        make().encode("text")  # type: ignore[arg-type]
    with pytest.raises(TokenError, match="takes bytes"):
        make().encode(memoryview(np.zeros(4, dtype=np.int32)))
    with pytest.raises(TokenError, match="whole numbers"):
        make().decode(np.array([0.5]))


@every_tokeniser
def test_saved_and_loaded(make: Callable[[], Tokeniser], tmp_path: Path) -> None:
    """A tokeniser that was saved and loaded has the same ids, digest and kind."""
    tokeniser = make()
    tokeniser.save(tmp_path / "model")
    loaded = load_tokeniser(tmp_path / "model")
    assert type(loaded) is type(tokeniser)
    assert (loaded.digest, loaded.vocab_size) == (tokeniser.digest, tokeniser.vocab_size)
    np.testing.assert_array_equal(loaded.encode(PROSE.encode()), tokeniser.encode(PROSE.encode()))
    assert {p.name for p in (tmp_path / "model").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


@every_tokeniser
def test_threads(make: Callable[[], Tokeniser]) -> None:
    """Threads that share one tokeniser get what each would get alone."""
    tokeniser = make()
    texts = [PROSE.encode()[i:] * 20 for i in range(16)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(tokeniser.encode, texts, timeout=30))
    for tokens, text in zip(together, texts, strict=True):
        np.testing.assert_array_equal(tokens, tokeniser.encode(text))


@every_tokeniser
@given(data=TEXTS)
def test_streamed_text(make: Callable[[], Tokeniser], data: bytes) -> None:
    """Text that is decoded token by token is the text of all bytes, with U+FFFD for what is not UTF-8."""
    tokeniser = make()
    if tokeniser.byte_tokens:  # a run of these is U+FFFD as a whole, as the library has it
        data = data.decode("utf-8", errors="ignore").encode()
    decoder = IncrementalDecoder(tokeniser)
    text = "".join(decoder.push(int(token)) for token in tokeniser.encode(data)) + decoder.finish()
    assert text == data.decode("utf-8", errors="replace")
