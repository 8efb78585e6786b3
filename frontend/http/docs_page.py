"""GET /docs: the API description as one page, without scripts and without anything from elsewhere."""

from __future__ import annotations

import html
from string import Template
from typing import Any

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title · API</title>
<style>
:root { color-scheme: light dark; --ink: #16202a; --soft: #5b6875; --paper: #f6f8f9; --card: #fff; --line: #dde4e9;
  --water: #0b7285; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf2; --soft: #93a3b0; --paper: #0e151b; --card: #151f27;
  --line: #24313b; --water: #4dc4d8; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 3rem 1.25rem; }
h1 { letter-spacing: -0.02em; } h2 { margin-top: 2.5rem; }
details { margin: .5rem 0; border: 1px solid var(--line); border-radius: .5rem; background: var(--card); }
summary { padding: .55rem .9rem; cursor: pointer; }
details > div { padding: 0 .9rem .8rem; overflow-x: auto; }
b { display: inline-block; min-width: 3.4rem; color: var(--water); }
span, p { color: var(--soft); }
code { font: .86em ui-monospace, "SF Mono", Menlo, Consolas, monospace; color: var(--ink); }
table { width: 100%; border-collapse: collapse; font-size: .9rem; }
td { padding: .3rem .6rem .3rem 0; border-top: 1px solid var(--line); vertical-align: top; }
a { color: var(--water); }
</style>
</head>
<body>
<main>
<h1>$title $version</h1>
<p>The same for programs: <a href="$root/openapi.json">openapi.json</a>.</p>
<h2>Routes</h2>
$routes
<h2>Objects</h2>
$schemas
</main>
</body>
</html>
""")


def render(document: dict[str, Any], root_path: str) -> str:
    """The page of an OpenAPI document."""
    routes = [
        _route(path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in ("get", "post")
    ]
    schemas = [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return _PAGE.substitute(
        title=html.escape(document["info"]["title"]),
        version=html.escape(document["info"]["version"]),
        root=html.escape(root_path),
        routes="\n".join(routes),
        schemas="\n".join(schemas),
    )


def _route(path: str, method: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    taken = f"<p>Takes {_type(body)}.</p>" if body else ""
    rows = [
        f"<tr><td><code>{status}</code></td><td>{_text(answer['description'])}</td>"
        f"<td>{_given(answer.get('content', {}))}</td></tr>"
        for status, answer in operation["responses"].items()
    ]
    summary = f"<b>{method.upper()}</b><code>{html.escape(path)}</code> <span>{_text(operation['summary'])}</span>"
    return f"<details><summary>{summary}</summary><div>{taken}<table>{''.join(rows)}</table></div></details>"


def _given(contents: dict[str, Any]) -> str:
    return "<br>".join(
        f"{_type(_item(content['schema']))} <span>{html.escape(kind)}</span>" for kind, content in contents.items()
    )


def _item(schema: dict[str, Any]) -> dict[str, Any]:
    """What an event holds, or the schema itself."""
    forms = schema.get("properties", {}).get("data", {}).get("anyOf", [{}])
    item: dict[str, Any] = forms[0].get("contentSchema", schema)
    return item


def _schema(name: str, schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{html.escape(field)}</code></td><td>{_type(inner)}{' · required' if field in required else ''}"
        f"</td><td>{_text(inner.get('description', ''))}</td></tr>"
        for field, inner in schema.get("properties", {}).items()
    ]
    about = _text(schema.get("description", ""))
    return (
        f'<details id="{html.escape(name)}"><summary><code>{html.escape(name)}</code> <span>{about}</span></summary>'
        f"<div><table>{''.join(rows)}</table></div></details>"
    )


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = html.escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return "one of " + ", ".join(f"<code>{html.escape(repr(value))}</code>" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (("minimum", "≥"), ("exclusiveMinimum", "&gt;"), ("maximum", "≤"), ("maxLength", "length ≤"))
        if key in schema
    ]
    return " ".join([html.escape(str(schema.get("type", "any"))), *bounds])


def _text(text: str) -> str:
    """Escaped, with the code in it set as code."""
    pieces = html.escape(text.replace("``", "`")).split("`")
    return "".join(piece if at % 2 == 0 else f"<code>{piece}</code>" for at, piece in enumerate(pieces))
