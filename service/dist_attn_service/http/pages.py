"""The pages for browsers: the files of the web page, and the OpenAPI document as HTML."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
START = "/"
PREFIX = "/page/"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types page-worker"
)
PAGE_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # asked for again each time, and answered with 304 while it is the same
}
"""The headers of every file of the page: nothing from elsewhere is loaded, and no other page frames it."""


@dataclass(frozen=True)
class PageFile:
    """One file of the page: its bytes, their media type, and their entity tag."""

    data: bytes
    media_type: str
    etag: str


def _read(folder: Traversable, prefix: str) -> dict[str, PageFile]:
    by_address: dict[str, PageFile] = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            by_address |= _read(entry, f"{prefix}{entry.name}/")
        elif kind := MEDIA_TYPES.get(entry.name.rpartition(".")[2]):
            data = entry.read_bytes()
            address = START if prefix + entry.name == f"{PREFIX}index.html" else prefix + entry.name
            by_address[address] = PageFile(data, kind, f'"{hashlib.sha256(data).hexdigest()[:32]}"')
    return by_address


PAGE_FILES = _read(files("dist_attn_service") / "page", PREFIX)
"""The files by path: `/` is the page itself. Only these addresses and the health checks are answered without a key."""


METHODS = ("get", "post", "put", "patch", "delete", "head", "options")
_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
code{font:14px ui-monospace,monospace}
h2{margin-top:2.5rem;text-transform:capitalize}
details{border:1px solid #8884;border-radius:.4rem;margin:.5rem 0;padding:.4rem .8rem}
summary{cursor:pointer}
.verb{display:inline-block;min-width:3.5rem;font-weight:600;text-transform:uppercase}
table{border-collapse:collapse;width:100%;margin:.5rem 0}
td,th{border-top:1px solid #8884;padding:.25rem .5rem;text-align:left;vertical-align:top}
"""


def render_reference(document: dict[str, Any]) -> str:
    """The page for an OpenAPI 3 document."""
    info = document["info"]
    title, version = escape(info["title"]), escape(info["version"])
    routes = "\n".join(_routes(document["paths"]))
    schemas = document.get("components", {}).get("schemas", {})
    shapes = "\n".join(_schema(name, schema) for name, schema in sorted(schemas.items()))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{title} {version}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title} <small>{version}</small></h1>
<p>{escape(info.get("description", ""))} For programs: <a href="openapi.json">openapi.json</a>.</p>
<p>When the service asks for keys, send <code>Authorization: Bearer YOUR-KEY</code> or <code>X-API-Key: YOUR-KEY</code>;
<code>/livez</code> and <code>/readyz</code> never ask.</p>
{routes}
<h2>shapes</h2>
{shapes}
</body>
</html>
"""


def _routes(paths: dict[str, Any]) -> Iterator[str]:
    """Every operation, under the heading of its tag, in the order in which tags first come."""
    groups: dict[str, list[str]] = {}
    for path, operations in paths.items():
        for method in METHODS:
            if method in operations:
                operation = operations[method]
                groups.setdefault(operation.get("tags", ["other"])[0], []).append(_operation(path, method, operation))
    for tag, rendered in groups.items():
        yield f"<h2>{escape(tag)}</h2>"
        yield from rendered


def _operation(path: str, method: str, operation: dict[str, Any]) -> str:
    parts = [f"<p>{escape(operation.get('description', ''))}</p>"]
    if parameters := operation.get("parameters"):
        rows = [(p["name"], p["in"], _kind(p["schema"]), p["schema"].get("description", "")) for p in parameters]
        parts.append(_table(("parameter", "where", "value", ""), rows))
    if body := operation.get("requestBody"):
        parts.append(_contents("body", "", body.get("content", {})))
    for status, response in operation.get("responses", {}).items():
        parts.append(_contents(status, response.get("description", ""), response.get("content", {})))
    summary = escape(operation.get("summary", ""))
    call = f'<span class="verb">{escape(method)}</span> <code>{escape(path)}</code>'
    return f"<details><summary>{call} {summary}</summary>\n{''.join(parts)}</details>"


def _contents(what: str, description: str, content: dict[str, Any]) -> str:
    kinds = "; ".join(
        f"<code>{escape(kind)}</code> {_kind(value.get('schema', {}))}" for kind, value in content.items()
    )
    return f"<p><b>{escape(what)}</b> {escape(description)} {kinds}</p>"


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = [
        (key, "required" if key in required else "", _kind(value), _notes(value))
        for key, value in schema.get("properties", {}).items()
    ]
    table = _table(("name", "", "value", ""), rows) if rows else f"<p>{_kind(schema)}</p>"
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<p>{escape(schema.get('description', ''))}</p>{table}</details>"
    )


def _table(heads: Iterable[str], rows: Iterable[tuple[str, str, str, str]]) -> str:
    """A table with rows of name, remark, value (which is HTML already) and words."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(remark)}</td><td>{kind}</td><td>{escape(words)}</td></tr>"
        for name, remark, kind, words in rows
    ]
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    """The kinds that a value may have, as HTML."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(_kind(option) for option in schema[key])
    if "const" in schema or "enum" in schema:
        return " or ".join(f"<code>{escape(repr(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if isinstance(kind, list):
        return escape(" or ".join(kind))
    return escape(kind) + escape(_bounds(schema))


def _bounds(schema: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return "".join(f" {sign} {schema[key]}" for key, sign in signs.items() if key in schema)


def _notes(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return " ".join([schema.get("description", ""), f"default {default}" if default is not None else ""]).strip()
