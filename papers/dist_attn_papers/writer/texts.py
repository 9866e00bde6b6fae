"""What the writer is trained on: novels, speeches, essays, a handbook, definitions; each part laid out in one way.

A model that has only read lines of 70 characters ends a line after every few words of a prompt that has none. So texts
are cut into parts of whole paragraphs, and each part is wrapped at some width, or has a line for each paragraph, or is
Markdown or HTML; exchanges of speech in novels are written once more as turns of a chat. War and Peace is left out.

A paragraph is a text without line breaks; a heading is one of fewer than 70 characters that is in capitals or begins
with a word such as Chapter.
"""

import hashlib
import html
import json
import random
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

from dist_attn.errors import ConfigError
from dist_attn_papers.retrieval.packages import unpacked
from dist_attn_papers.retrieval.texts import brown_documents, glosses, speeches

__all__ = ["HELD_OUT", "VALIDATION", "write_texts"]

NOVELS = Path(__file__).parent / "novels.sha256"
HELD_OUT = "war_and_peace.txt"
VALIDATION = {"wrapped": "validation.txt", "lines": "validation-lines.txt"}
VALIDATION_CHARACTERS = 300_000
PART_CHARACTERS = (4_000, 60_000)
# How often a part is laid out so.
LAYOUTS = {"wrapped": 0.36, "lines": 0.46, "markdown": 0.12, "html": 0.06}
TURN_CHARACTERS = 400
FEWEST_TURNS = 2


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs of a text that is wrapped, parted by empty lines."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.replace("\r", "")) if part.strip()]


class _Paragraphs(HTMLParser):
    """What stands in the headings, paragraphs and items of a page; tables and listings do not count."""

    _TAKEN = frozenset({"h1", "h2", "h3", "h4", "p", "li", "blockquote", "dd"})
    _SKIPPED = frozenset({"pre", "table", "script", "style", "nav", "head"})

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._part: list[str] = []
        self._skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A new paragraph begins at a tag that makes one."""
        self._skipped += tag in self._SKIPPED
        if tag in self._TAKEN or tag in self._SKIPPED:
            self._end()

    def handle_endtag(self, tag: str) -> None:
        """And ends where the tag does."""
        if tag in self._TAKEN:
            self._end()
        self._skipped = max(0, self._skipped - (tag in self._SKIPPED))

    def handle_data(self, data: str) -> None:
        """Text counts where nothing around it is skipped."""
        if not self._skipped:
            self._part.append(data)

    def _end(self) -> None:
        text = " ".join("".join(self._part).split())
        self._part.clear()
        if len(text) > 1:
            self.paragraphs.append(text)


def page_paragraphs(folder: Path) -> Iterator[list[str]]:
    """The paragraphs of each page below a folder."""
    for path in sorted(folder.rglob("*.html")):
        parser = _Paragraphs()
        parser.feed(path.read_text("utf-8", "replace"))
        if parser.paragraphs:
            yield parser.paragraphs


def novels(books: Path) -> dict[str, str]:
    """The novels by their files' names, whose digests `novels.sha256` lists.

    Raises: ConfigError for a novel that is missing, or another edition.
    """
    found = dict[str, str]()
    for line in NOVELS.read_text().splitlines():
        digest, name = line.split()
        try:
            contents = (books / name).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"novel {books / name} cannot be read: {error.strerror}; --books names their folder"
            ) from None
        if hashlib.sha256(contents).hexdigest() != digest:
            raise ConfigError(f"novel {books / name} is not the one that was trained on, whose SHA-256 is {digest}")
        found[name] = contents.decode()
    return found


def documents(novels: Mapping[str, str]) -> Iterator[list[str]]:
    """The paragraphs of every text that is trained on."""
    for name, text in novels.items():
        if name != HELD_OUT:
            yield paragraphs_of(text)
    for _, text in speeches(held_out=False):
        yield paragraphs_of(text)
    for _, text in brown_documents(held_out=False):
        yield _grouped(re.split(r"(?<=[.?!]) (?=[A-Z\"])", text))
    yield from page_paragraphs(unpacked("anarchism"))
    yield from page_paragraphs(unpacked("handbook") / "usr/share/doc/debian-handbook/html/en-US")
    lines = [f"{', '.join(words)}: {gloss}." for words, gloss in glosses(held_out=False)]
    random.Random(0).shuffle(lines)
    yield lines[: len(lines) // 4]


def _grouped(sentences: Sequence[str]) -> list[str]:
    """Five at a time: the Brown corpus marks no paragraphs."""
    return [" ".join(sentences[start : start + 5]) for start in range(0, len(sentences), 5)]


def is_heading(paragraph: str) -> bool:
    """Whether it is short and in capitals, or begins as a chapter does."""
    return len(paragraph) < 70 and (
        paragraph.isupper() or re.match(r"(?i)(chapter|book|part|volume)\b", paragraph) is not None
    )


def lay_out(paragraphs: Sequence[str], draw: random.Random) -> str:
    """The paragraphs in one of `LAYOUTS`."""
    kind = draw.choices(list(LAYOUTS), list(LAYOUTS.values()))[0]
    if kind == "wrapped":
        width = draw.randint(58, 82)
        return "\n\n".join(
            textwrap.fill(paragraph, width, break_long_words=False, break_on_hyphens=False) for paragraph in paragraphs
        )
    if kind == "lines":
        between = "\n\n" if draw.random() < 0.7 else "\n"
        return between.join(paragraphs)
    if kind == "markdown":
        level = "#" * draw.randint(1, 3)
        marked = (
            f"{level} {p.title() if p.isupper() else p}" if is_heading(p) else re.sub(r"_(\w[^_]*)_", r"*\1*", p)
            for p in paragraphs
        )
        return "\n\n".join(marked)
    tags = (("h2" if is_heading(p) else "p", html.escape(p, quote=False)) for p in paragraphs)
    return "\n".join(f"<{tag}>{text}</{tag}>" for tag, text in tags)


def parts(paragraphs: Sequence[str], draw: random.Random) -> Iterator[str]:
    """Runs of whole paragraphs of some thousand characters, each laid out in one way."""
    part, size, most = list[str](), 0, draw.randint(*PART_CHARACTERS)
    for paragraph in paragraphs:
        part.append(paragraph)
        size += len(paragraph)
        if size > most:
            yield lay_out(part, draw)
            part, size, most = [], 0, draw.randint(*PART_CHARACTERS)
    if part:
        yield lay_out(part, draw)


_SPEECH = re.compile(r"[“\"]([^“”\"]+)[”\"]")


def turns(paragraphs: Sequence[str]) -> Iterator[list[str]]:
    """Runs of paragraphs that speak: what is said in each of them, in the order of the exchange."""
    run = list[str]()
    for paragraph in [*paragraphs, ""]:
        said = " ".join(part.strip() for part in _SPEECH.findall(paragraph))
        spoken = len(said) > 0.5 * len(paragraph) > 0 and len(said) < TURN_CHARACTERS
        if spoken:
            run.append(said[0].upper() + said[1:].rstrip(",") + ("." if said[-1] in "," or said[-1].isalnum() else ""))
            continue
        if len(run) >= FEWEST_TURNS:
            yield run
        run = []


def as_chat(run: Sequence[str]) -> str:
    """Turns in the form of the writer's chat template."""
    speakers = ("User", "Assistant")
    return "\n\n".join(f"{speakers[number % 2]}: {said}" for number, said in enumerate(run))


def write_texts(books: Path, folder: Path, seed: int = 0) -> None:
    """Write `train.jsonl` (a document a line, in a drawn order), `plain.txt` for the vocabulary, two validation texts.

    Raises: ConfigError for a novel or a package that cannot be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw, found, read = random.Random(seed), list[str](), novels(books)
    for paragraphs in documents(read):
        found.extend(parts(paragraphs, draw))
        found.extend(as_chat(run) for run in turns(paragraphs))
    draw.shuffle(found)
    with (folder / "train.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found)
    book = read[HELD_OUT][:VALIDATION_CHARACTERS]
    (folder / VALIDATION["wrapped"]).write_text(book)
    (folder / VALIDATION["lines"]).write_text("\n\n".join(paragraphs_of(book)) + "\n")
    (folder / "plain.txt").write_text("\n\n".join(found))  # what the vocabulary is learnt from
