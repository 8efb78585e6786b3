"""Writes docs/compatibility.md from the declarations.

``python -m frontend.http.compatibility > docs/compatibility.md``
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from frontend.http.field_docs import FieldDoc, describe
from frontend.http.openapi import CONTENTS, EVENTS, STATUSES
from frontend.http.route_table import NOT_OFFERED, ROUTES, Access, RouteSpec
from frontend.http.token_routes import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from frontend.request.requests import ChatRequest, CommonFields, CompletionRequest, StreamOptions

_HEAD = """# Compatibility

Every route and every request field: what becomes of it, its range, its default, and the error for what does not fit.
This page is written by `python -m frontend.http.compatibility` from the structs that requests are decoded into; a test
keeps it in step. The same, for programs, is at `/openapi.json`.
"""

_CLASSES = """## Fields

| class | means |
|---|---|
| honoured | does what it says, or is a 400 that says why not |
| inert | accepted, typed, and cannot change tokens |
| refused | 400 `unsupported_parameter` unless absent or neutral |

`null` is the same as leaving a field out, and so are `[]` and `{}` for every field that is not required. Numbers are
not read from strings, nor `1` as `true`. A field that is not listed is ignored and named in the response header
`x-ignored-fields`, or a 400 `unknown_parameter` under `--strict-fields`; one within two letters of a listed name is a
400 that asks *did you mean*. Two spellings of one field with different values are a 400 `invalid_value`.
"""

_ACCESS = {
    Access.OPEN: "no key",
    Access.KEY: "any key",
    Access.METRICS: "an admin key, unless `--metrics-public`",
    Access.ADMIN: "an admin key; not there without one",
    Access.DOCS: "any key, unless `--docs public`",
}

_ERRORS = """## Errors

Every answer with a status of 400 or more has the body `{"error": {"message", "type", "param", "code"}}`; `param` is the
path of the field at fault. Every response has `x-request-id` and `x-headrace-frontend`.
"""

_OTHER_STATUSES = {
    405: "The route does not take this method; `Allow` says which.",
    408: "A request's headers took longer than 30 s, or no more of its body came for 30 s.",
    431: "The request line and headers are larger than `--max-header-size`.",
}


def document() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_routes(), _ERRORS, *_statuses(), _CLASSES, *_field_tables()])


def main() -> None:
    """Write the page to stdout."""
    sys.stdout.write(document())


def _routes() -> Iterator[str]:
    yield "## Routes\n"
    yield "| route | also as | what | takes | gives | with keys, needs |"
    yield "|---|---|---|---|---|---|"
    for spec in ROUTES:
        yield f"| {' | '.join(_route(spec))} |"
    yield ""
    yield "Not offered yet, 404 `route_not_offered`: " + ", ".join(f"`{path}`" for path in NOT_OFFERED) + "."
    yield "What can be read with GET also answers HEAD; every route answers OPTIONS, without a key. Anything else is a"
    yield "404 `route_not_found` or a 405 with `Allow`.\n"


def _route(spec: RouteSpec) -> Iterator[str]:
    content = CONTENTS[spec.path]
    yield f"`{spec.method} {spec.path}`"
    yield ", ".join(f"`{alias}`" for alias in spec.aliases)
    yield spec.summary
    yield " or ".join(f"`{kind.__name__}`" for kind in content.requests)
    yield " or ".join(
        f"`{name}` events" if kind == EVENTS else f"`{name}`" if name else kind
        for kind, name in content.answers.items()
    )
    yield _ACCESS[spec.access]


def _statuses() -> Iterator[str]:
    yield "| status | when |"
    yield "|---|---|"
    for status, text in sorted({**STATUSES, **_OTHER_STATUSES}.items()):
        yield f"| {status} | {text} |"
    yield ""


def _field_tables() -> Iterator[str]:
    common = {doc.name for doc in describe(CommonFields)}
    yield from _table("Chat and completions", describe(CommonFields))
    yield from _table("Chat only", [doc for doc in describe(ChatRequest) if doc.name not in common])
    yield from _table("Completions only", [doc for doc in describe(CompletionRequest) if doc.name not in common])
    yield from _table("`stream_options`", describe(StreamOptions))
    yield "### Tokenize and render\n"
    yield "They take the fields of chat or of completions, those that do not change the prompt included, and:\n"
    known = {doc.name for kind in (ChatRequest, CompletionRequest) for doc in describe(kind)} - {"model"}
    own = {doc.name: doc for kind in (TokenizeChatRequest, TokenizeTextRequest) for doc in describe(kind)}
    yield from _rows([doc for name, doc in own.items() if name not in known])
    yield from _table("Detokenize", describe(DetokenizeRequest))


def _table(title: str, docs: list[FieldDoc]) -> Iterator[str]:
    yield f"### {title}\n"
    yield from _rows(docs)


def _rows(docs: list[FieldDoc]) -> Iterator[str]:
    yield "| field | class | values | default | what it does | otherwise |"
    yield "|---|---|---|---|---|---|"
    for doc in docs:
        names = f"`{doc.name}`" + "".join(f", `{other}`" for other in doc.synonyms)
        cells = (names, doc.kind, doc.type, doc.default, doc.meaning, doc.error)
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("``", "`") for cell in cells) + " |"
    yield ""


if __name__ == "__main__":
    main()
