"""`dist-attn help WORD…`: commands, their options and the settings of `serve` in whose words all of these stand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from dist_attn.errors import InputError

__all__ = ["Entry", "entries", "help_search"]


@dataclass(frozen=True)
class Entry:
    """One thing that can be said or set, what it is, and what is typed for an example."""

    name: str
    words: str
    examples: tuple[str, ...] = ()
    is_command: bool = False

    def has(self, words: Sequence[str]) -> bool:
        """Whether all of the words stand in it, in any case and also as parts of longer ones."""
        text = " ".join((self.name, self.words, *self.examples)).casefold()
        return all(word.casefold() in text for word in words)


def entries(command: Any, name: str) -> Iterator[Entry]:
    """Every command below this one and every option of it, as `--help` has them; `command` is one of click's."""
    for word, inner in getattr(command, "commands", {}).items():
        paragraphs = [" ".join(part.split()) for part in (inner.help or "").split("\n\n")]
        examples = tuple(part.removeprefix("Example: ") for part in paragraphs if part.startswith("Example: "))
        yield Entry(f"{name} {word}", paragraphs[0], examples, is_command=True)
        for parameter in inner.params:
            if (words := getattr(parameter, "help", None)) and parameter.name != "help":
                flag = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
                yield Entry(f"{name} {word} {flag}", words)
        yield from entries(inner, f"{name} {word}")


def search(command: Any, words: Sequence[str]) -> list[Entry]:
    """What holds all of the words: commands, then their options, then settings."""
    from dist_attn.settings import settings_words

    known = sorted(entries(command, "dist-attn"), key=lambda entry: not entry.is_command)
    known += [Entry(f"setting {key}", about) for key, about in settings_words().items()]
    return [entry for entry in known if entry.has(words)]


def help_search(
    context: typer.Context,
    words: Annotated[list[str], typer.Argument(help="What is looked for; all of the words must be there.")],
) -> None:
    """Search the help: commands, options and settings that speak of these words.

    Example: dist-attn help checkpoint

    Example: dist-attn help rows window
    """
    from rich.text import Text

    from dist_attn.commands.tables import stdout_console

    hits = search(context.find_root().command, words)
    if not hits:
        raise InputError(f"nothing speaks of {' and '.join(words)}; `dist-attn --help` lists the commands")
    console = stdout_console()
    for hit in hits:
        if not console.is_terminal:
            print(hit.name, hit.words, *hit.examples, sep="\t")
            continue
        console.print(Text.assemble((hit.name, "bold"), "  ", hit.words))
        for example in hit.examples:
            console.print(Text(f"    {example}", style="dim"))
