"""`python -m docs.making.reference`: the pages of commands, settings and routes, from the code that has them."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.models import ArgumentInfo

from dist_attn.settings import Settings as SettingsTree
from dist_attn.shipped import default_model_folder

__all__ = ["PAGES", "commands_page", "configuration_page", "http_page", "write"]

FOLDER = Path("docs/reference")
METHODS = ("get", "head", "post", "put", "patch", "delete", "options")
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
    parts += _commands(app, "dist-attn")
    return "\n".join(parts)


def _commands(program: typer.Typer, name: str) -> Iterator[str]:
    for command in program.registered_commands:
        if command.callback is not None and not command.hidden:
            word = command.name or command.callback.__name__.replace("_", "-")
            yield f"## {name} {word}\n"
            yield f"{_help(command.callback.__doc__ or '')}\n"
            yield _table(("argument or option", "what", "values", "default"), list(_parameters(command.callback)))
    for group in program.registered_groups:
        if group.typer_instance is not None:
            yield from _commands(group.typer_instance, f"{name} {group.typer_instance.info.name}")


def _help(text: str) -> str:
    """The words of `--help`, an example as code."""
    paragraphs = [_sentence(part) for part in inspect.cleandoc(text).replace("\b", "").split("\n\n")]
    return "\n\n".join(re.sub(r"^Example: (.*)$", r"Example: `\1`", part) for part in paragraphs)


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
        return f"{_values(get_args(kind)[0], low, high)}, repeatable"
    if get_args(kind):  # an option that may be left out
        return _values(next(one for one in get_args(kind) if one is not type(None)), low, high)
    words = {int: "a whole number", float: "a number", str: "a text", Path: "a path", bool: ""}[kind]
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
    rows = []
    for name, field in fields:
        default = None if field.default_factory else field.get_default()  # what depends on the machine is in the words
        shown = "" if default in (None, "", ()) else f"`{default}`"
        rows.append((f"`{prefix}{name}`", field.description or "", shown))
    return _table(("key", "what", "default"), rows)


def http_page() -> str:
    """Every route and every shape of its bodies, from the service's own OpenAPI text."""
    from dist_attn_service.app import create_app
    from dist_attn_service.base.settings import Settings

    app = create_app(Settings(api_address="ipc:///unused", model=default_model_folder()))
    document = app.openapi()
    parts = [
        "# Every route\n",
        NOTE,
        "What the service says of itself at `/openapi.json` and, for people, at `/docs`.",
        "[The service](service.md) explains it. Every refusal is a problem document (RFC 9457) that also holds",
        "OpenAI's error object.\n",
    ]
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method in operations:
                operation = operations[method]
                groups.setdefault(operation.get("tags", ["other"])[0], []).append(_route(path, method, operation))
    for tag, routes in groups.items():
        parts += [f"## {tag}\n", *routes]
    parts.append("## Shapes\n")
    parts += [_shape(name, shape) for name, shape in sorted(document["components"]["schemas"].items())]
    return "\n".join(parts)


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [f"### {method.upper()} `{path}`\n", _sentence(operation.get("description") or operation["summary"]) + "\n"]
    rows = [
        (f"`{one['name']}`", one["in"], _kind(one["schema"]), one["schema"].get("description", ""))
        for one in operation.get("parameters", ())
    ]
    if rows:
        parts.append(_table(("parameter", "where", "value", "what"), rows))
    bodies = [_content(content) for content in (operation.get("requestBody", {}).get("content", {}),) if content]
    if bodies:
        parts.append(f"Body: {bodies[0]}.\n")
    answers = [
        f"{status} {_content(answer.get('content', {}))}".strip()
        for status, answer in operation.get("responses", {}).items()
        if status != "default"
    ]
    parts.append(f"Answers: {'; '.join(answers)}.\n")
    return "\n".join(parts)


def _content(content: dict[str, Any]) -> str:
    said = []
    for kind, value in content.items():
        shape = _kind(value.get("schema", {}))
        said.append(f"`{kind}` {shape}".strip())
    return ", ".join(said)


def _shape(name: str, shape: dict[str, Any]) -> str:
    rows = [
        (f"`{field}`", _kind(value), "yes" if field in shape.get("required", ()) else "", value.get("description", ""))
        for field, value in shape.get("properties", {}).items()
    ]
    head = f"### {name}\n\n{_sentence(shape.get('description', ''))}\n"
    return head + ("\n" + _table(("field", "value", "needed", "what"), rows) if rows else "")


def _kind(schema: dict[str, Any]) -> str:
    """A JSON schema in a few words; shapes are linked."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if options := schema.get("enum"):
        return ", ".join(f"`{option}`" for option in options)
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_kind(one) for one in schema[several]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
    return f"{schema.get('type', 'anything')}{bounds}"


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cells = [[_sentence(str(cell)).replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands_page,
    "configuration.md": configuration_page,
    "http.md": http_page,
}
"""By file: what writes it."""


def write(root: Path) -> None:
    """Bring all pages up to the code."""
    for name, page in PAGES.items():
        (root / FOLDER / name).write_text(page())


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2])
    sys.exit(0)
