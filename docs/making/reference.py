"""`python -m docs.making.reference`: the pages of commands, settings and routes, from the code that has them."""

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from dist_attn_service.schemas.base import MODEL_WORDS
from typer.models import ArgumentInfo

from dist_attn.settings import Settings as SettingsTree
from dist_attn.shipped import default_model_folder

__all__ = ["PAGES", "commands_page", "configuration_page", "service_page", "write"]

FOLDER = Path(__file__).resolve().parents[1] / "reference"
NOT_LOOKED_AT = "not looked at"
ONLY = "only "  # what begins so is refused, with these words, at any other value
SHARED_BY = 3  # commands with the very same option, which is then told once
LARGE = 1 << 53  # numbers beyond which a bound is no news
METHODS = ("get", "head", "post", "put", "patch", "delete", "options")
MARKED = re.compile(r"<!-- (?P<what>(?:routes|requests|answers)\b[^>]*?) -->.*?<!-- end -->", re.DOTALL)
NOTE = "<!-- Written by `python -m docs.making.reference`; a test compares it with the code. -->\n"


def commands_page() -> str:
    """Every command with its arguments and options, from the command line's own declarations."""
    from dist_attn.commands.cli import app

    parts = [
        "# Commands\n",
        NOTE,
        "`dist-attn COMMAND`, which is `python -m dist_attn COMMAND`, also below torchrun and mpiexec where ranks make",
        "sense. Exit codes: 0 done, 1 the work failed, 2 the input was not usable, 130 Ctrl-C.",
        "[The command line](command-line.md) says more.\n",
    ]
    commands = dict(_commands(app, "dist-attn"))
    options = {name: [_option(*one) for one in _parameters(callback)] for name, callback in commands.items()}
    uses = Counter(line for lines in options.values() for line in lines)
    often = [line for line, count in uses.most_common() if count >= SHARED_BY]
    shared = list({line.partition(":")[0]: line for line in reversed(often)}.values())  # of one name the commonest
    parts += ["## Shared options\n", "\n".join(shared) + "\n"]
    told = dict.fromkeys(shared, "shared options")
    for name, callback in commands.items():
        own = _once(options[name], told, name)
        parts += [f"## {name}\n", _help(callback.__doc__ or "") + "\n", "\n".join(own) + "\n"]
    return "\n".join(parts)


def _commands(program: typer.Typer, name: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Each command under its whole name."""
    for command in program.registered_commands:
        if command.callback is not None and not command.hidden:
            yield f"{name} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for group in program.registered_groups:
        if group.typer_instance is not None:
            yield from _commands(group.typer_instance, f"{name} {group.typer_instance.info.name}")


def _option(name: str, words: str, values: str, default: str) -> str:
    """A line of what a command takes."""
    said = "; ".join(
        one for one in (values, "needed" if default == "needed" else default and f"default {default}") if one
    )
    return f"* {name}: {_sentence(words)}{f' ({said})' if said else ''}"


def _help(text: str) -> str:
    """The words of `--help`, with the first of its examples as code."""
    paragraphs = [_sentence(part) for part in inspect.cleandoc(text).replace("\b", "").split("\n\n")]
    examples = [part for part in paragraphs if part.startswith("Example: ")]
    shown = [part for part in paragraphs if part not in examples[1:]]
    return "\n\n".join(re.sub(r"^Example: (.*)$", r"Example: `\1`", part) for part in shown)


def _parameters(callback: Callable[..., Any]) -> Iterator[tuple[str, str, str, str]]:
    """Name, words, values and default of each parameter, read off the function's own annotations."""
    for name, parameter in inspect.signature(callback, eval_str=True).parameters.items():
        if get_origin(parameter.annotation) is not Annotated:
            continue
        kind, info = get_args(parameter.annotation)[:2]
        positional = isinstance(info, ArgumentInfo)
        # In Annotated[…, Option("--json")] the first name is given in the place of the default.
        given = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
        names = name.upper() if positional else ", ".join(given or [f"--{name.replace('_', '-')}"])
        default = parameter.default
        shown = "needed" if default is parameter.empty else "" if default in (None, False, ()) else f"`{default}`"
        yield f"`{names}`", info.help or "", _values(kind, info.min, info.max), shown


def _values(kind: Any, low: float | None, high: float | None) -> str:
    """What a parameter takes, in words."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if get_origin(kind) is list:
        return ", ".join(filter(None, (_values(get_args(kind)[0], low, high), "repeatable")))
    if get_args(kind):  # an option that may be left out
        return _values(next(one for one in get_args(kind) if one is not type(None)), low, high)
    high = None if high is not None and high >= LARGE else high
    words = {int: "integer", float: "number", str: "", Path: "", bool: ""}[kind]
    return words + (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")


def configuration_page() -> str:
    """Every setting of the tree with what it is and its default."""
    parts = [
        "# Configuration\n",
        NOTE,
        "Defaults, then a TOML file (`--config` or `DIST_ATTN_CONFIG`), then the environment (`http.port` is",
        "`DIST_ATTN_HTTP__PORT`, lists have commas), then flags; the later win. Unknown keys are refused.",
        "`dist-attn config show` prints every value and where it comes from.\n",
        "## At the top\n",
    ]
    own: list[tuple[str, Any]] = []
    sections: list[tuple[str, Any]] = []
    for name, field in SettingsTree.model_fields.items():
        (sections if hasattr(field.annotation, "model_fields") else own).append((name, field))
    parts.append(_settings(own, ""))
    for name, field in sections:
        kind: Any = field.annotation
        parts += [f"## [{name}]\n", " ".join((kind.__doc__ or "").split()) + "\n"]
        parts.append(_settings(list(kind.model_fields.items()), f"{name}."))
    return "\n".join(parts)


def _settings(fields: Sequence[tuple[str, Any]], prefix: str) -> str:
    lines = []
    for name, field in fields:
        default = None if field.default_factory else field.get_default()  # what depends on the machine is in the words
        shown = "" if default in (None, "", ()) else f" = `{default}`"
        lines.append(f"* `{prefix}{name}`{shown}: {_sentence(field.description or '')}")
    return "\n".join(lines) + "\n"


def service_page() -> str:
    """The page of the service: by hand, with routes and shapes between marks from the service's own OpenAPI text.

    Raises:
        ValueError: a route stands in no part of the page, or in two.
    """
    from dist_attn_service.app import create_app
    from dist_attn_service.base.settings import Settings

    app = create_app(Settings(api_address="ipc:///unused", model=default_model_folder()))
    document = app.openapi()
    shapes, sent = document["components"]["schemas"], _sent(document)
    told: dict[str, str] = {}
    requests = _requests(shapes, sent, told)
    explained = {name for name in shapes.keys() - sent if "`" in shapes[name].get("description", "")}
    paths: list[str] = []

    def part(mark: re.Match[str]) -> str:
        kind, *prefixes = mark["what"].split()
        if kind == "routes":
            here = [path for path in document["paths"] if any(_within(path, prefix) for prefix in prefixes)]
            paths.extend(here)
            operations = [(path, method, document["paths"][path].get(method)) for path in here for method in METHODS]
            routes = [_route(path, method, operation, told) for path, method, operation in operations if operation]
            lines = [_linked(line, explained | sent) for line in routes]
        elif kind == "requests":
            lines = requests
        else:
            lines = [_linked(_answer(name, shapes[name]), explained) for name in sorted(explained)]
        return f"<!-- {mark['what']} -->\n\n" + "\n".join(lines) + "\n<!-- end -->"

    page = MARKED.sub(part, (FOLDER / "service.md").read_text())
    if wrong := sorted(path for path in {*document["paths"], *paths} if paths.count(path) != 1):
        raise ValueError(f"each route stands in one part of service.md, marked by its path; not so {', '.join(wrong)}")
    return page


def _linked(text: str, shapes: Set[str]) -> str:
    """A text with links to these shapes alone, which stand on the page."""
    return re.sub(r"\[(\w+)\]\(#\w+\)", lambda link: link[0] if link[1] in shapes else f"`{link[1]}`", text)


def _within(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def _requests(shapes: dict[str, Any], sent: set[str], told: dict[str, str]) -> list[str]:
    """What may be sent, by shape; the fields that several have are shapes of their own."""
    from dist_attn_service.schemas.completions import AnswerOptions, DrawingOptions, HowSoon
    from dist_attn_service.schemas.neutral_fields import NeutralDrawing

    lines: list[str] = []
    shared = {kind.__name__: kind for kind in (HowSoon, DrawingOptions, AnswerOptions, NeutralDrawing)}
    own = {name: set(kind.__annotations__) for name, kind in shared.items()}
    complete = shapes["CompletionRequest"]["properties"]
    for name, kind in shared.items():
        fields = {field: complete[field] for field in kind.__annotations__}
        lines.append(_request(name, {"description": kind.__doc__, "properties": fields}, (), told))
    for name in sorted(sent):
        fields = shapes[name].get("properties", {})
        has = [each for each, names in own.items() if all(fields.get(one) == complete[one] for one in names)]
        left = {field: value for field, value in fields.items() if not any(field in own[each] for each in has)}
        lines.append(_request(name, {**shapes[name], "properties": left}, has, told))
    return lines


def _sent(document: dict[str, Any]) -> set[str]:
    """The shapes of what clients send, and those inside them."""
    operations = [one for path in document["paths"].values() for one in path.values()]
    found: set[str] = set()
    waiting = [str([one.get("requestBody") for one in operations])]
    while waiting:
        names = set(re.findall(r"#/components/schemas/(\w+)", waiting.pop())) - found
        found |= names
        waiting += [str(document["components"]["schemas"][name]) for name in names]
    return found


def _once(lines: Sequence[str], told: dict[str, str], name: str = "") -> list[str]:
    """Lines of which several that one shape has told before are a link to it; `told` notes what `name` tells first."""
    here: list[str] = []
    elsewhere: dict[str, list[str]] = {}
    for line in lines:
        first = told.setdefault(line, name) if name else told.get(line, name)
        (here if first == name else elsewhere.setdefault(first, [])).append(line)
    for shape, again in elsewhere.items():
        names = ", ".join(line.split()[1].rstrip(":") for line in again)
        here += [f"* {names}: as in [{shape}](#{shape.lower().replace(' ', '-')})"] if len(again) > 1 else again
    return here


def _route(path: str, method: str, operation: dict[str, Any], told: dict[str, str]) -> str:
    parts = [f"**{method.upper()} `{path}`**: {_sentence(operation.get('description') or operation['summary'])}\n"]
    given = [one for one in operation.get("parameters", ()) if one["in"] != "path"]
    given = [one for one in given if one["schema"].get("description") != MODEL_WORDS]
    if given:
        lines = [_field(one["name"], one["schema"], "header" * (one["in"] == "header")) for one in given]
        parts.append("\n".join(_once(lines, told)) + "\n")
    answers = [
        f"{'' if status == '200' else status} {_content(answer.get('content', {}))}".strip()
        for status, answer in operation.get("responses", {}).items()
        if status != "default"
    ]
    said = [("Body", _content(operation.get("requestBody", {}).get("content", {}))), ("Answer", "; ".join(answers))]
    if any(words for _, words in said):
        parts.append(" ".join(f"{what}: {words}." for what, words in said if words) + "\n")
    return "\n".join(parts)


def _content(content: dict[str, Any]) -> str:
    said = []
    for kind, value in content.items():
        shape = _kind(value.get("schema", {}))
        said.append(shape if kind == "application/json" else f"`{kind}`")
    return ", ".join(said)


def _request(name: str, shape: dict[str, Any], shared: Sequence[str], told: dict[str, str]) -> str:
    fields, needed = shape["properties"], shape.get("required", ())
    fields = {field: value for field, value in fields.items() if value.get("description") != MODEL_WORDS}
    neutral = [f"`{field}`" for field, value in fields.items() if value.get("description", "").startswith(ONLY)]
    unused = [f"`{field}`" for field, value in fields.items() if value.get("description", "").startswith(NOT_LOOKED_AT)]
    lines = [f"* All of {', '.join(f'[{each}](#{each.lower()})' for each in shared)}."] if shared else []
    kept = {field: value for field, value in fields.items() if f"`{field}`" not in (*neutral, *unused)}
    lines += _once([_field(field, value, "needed" * (field in needed)) for field, value in kept.items()], told, name)
    lines += [f"* {', '.join(neutral)}: only the usual value"] if neutral else []
    lines += [f"* {', '.join(unused)}: taken and {NOT_LOOKED_AT}"] if unused else []
    return f"### {name}\n\n{_sentence(shape.get('description', ''))}\n\n" + "\n".join(lines) + "\n"


def _field(name: str, schema: dict[str, Any], more: str = "") -> str:
    """A line of what may be sent."""
    words = _sentence(schema.get("description", ""))
    kind = _kind(schema).removesuffix(" or null")
    said = ", ".join(one for one in (kind, more) if one)
    return f"* `{name}`{f' {said}' if said else ''}{f': {words}' if words else ''}"


def _answer(name: str, shape: dict[str, Any]) -> str:
    """What an answer holds, by kind of value."""
    fields: dict[str, list[str]] = {}
    for field, value in shape.get("properties", {}).items():
        fields.setdefault(_kind(value), []).append(f"`{field}`")
    said = "; ".join(f"{', '.join(names)}: {kind}" for kind, names in fields.items())
    return f"### {name}\n\n{_sentence(shape.get('description', ''))}\n\n{said}.\n"


def _kind(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words; shapes are linked."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if options := schema.get("enum"):
        return " or ".join(f"`{option}`" for option in options)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_kind(one) for one in schema[several]))
    if schema.get("type") == "array":
        held = re.sub(r" from -?\d+", "", _kind(schema.get("items", {})))
        return f"{held}[]" if held.isalpha() else f"list of {held}"  # [](…)[] and [][] are links to Markdown
    low, above, high = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    bounds = f" from {low}" if low is not None and low > -LARGE else "" if above is None else f" above {above}"
    bounds += f" to {high}" if high is not None and high < LARGE else ""
    return f"{schema.get('type', 'anything')}{bounds}"


def _sentence(text: str) -> str:
    return " ".join(text.split())


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "configuration.md": configuration_page,
    "service.md": service_page,
}
"""By file: what writes it."""


def write() -> None:
    """Bring all pages up to the code."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


if __name__ == "__main__":
    write()
    sys.exit(0)
