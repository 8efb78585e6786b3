"""What is written about the API is what its declarations say."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from frontend.http import compatibility, openapi
from frontend.http.docs_page import render
from frontend.http.field_docs import NOTES, FieldDoc, describe, request_schemas
from frontend.http.route_table import ROUTES
from frontend.http.token_routes import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from frontend.request import fields
from frontend.request.requests import ChatRequest, CompletionRequest, StreamOptions

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
REQUESTS = (ChatRequest, CompletionRequest, StreamOptions, DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest)


def test_the_page_is_what_the_declarations_say() -> None:
    assert PAGE.read_text() == compatibility.document(), "run python -m frontend.http.compatibility"


def every_field() -> list[FieldDoc]:
    return [doc for kind in REQUESTS for doc in describe(kind)]


def test_every_field_is_explained() -> None:
    unexplained = {doc.name for doc in every_field() if doc.kind == "honoured" and not (doc.meaning and doc.default)}
    assert unexplained == set(), "give it a docstring, or a note in frontend/http/field_docs.py"
    assert set(NOTES) <= {doc.name for doc in every_field()}, "a note about a field that is no more"


@pytest.mark.parametrize("kind", REQUESTS)
def test_every_field_and_synonym_is_in_the_schema(kind: type[msgspec.Struct]) -> None:
    table = fields.table_of(kind)
    properties = request_schemas(kind)[kind.__name__]["properties"]
    assert set(properties) == {*table.rules, *table.synonyms}
    for name, rule in table.rules.items():
        if rule.refused is not None:
            assert properties[name]["enum"] == [None, [], {}, *rule.refused.neutral]


def test_every_route_is_described_and_every_reference_leads_somewhere() -> None:
    document = openapi.document("1.0", "/api")
    assert set(document["paths"]) == {path for spec in ROUTES for path in spec.paths}
    assert set(openapi.CONTENTS) == {spec.path for spec in ROUTES}
    ids = [operation["operationId"] for item in document["paths"].values() for operation in item.values()
           if isinstance(operation, dict)]  # fmt: skip
    assert len(ids) == len(set(ids))
    encoded = msgspec.json.encode(document).decode()
    references = {piece.partition('"')[0] for piece in encoded.split('"$ref":"#/components/')[1:]}
    for reference in references:
        kind, _, name = reference.partition("/")
        assert name in document["components"][kind], reference


def test_the_page_for_people_needs_nothing_from_elsewhere() -> None:
    page = render(openapi.document("1.0"), "")
    for path in (path for spec in ROUTES for path in spec.paths):
        assert f"<code>{path}</code>" in page
    assert "http://" not in page and "https://" not in page and "<script" not in page
    assert 'id="ChatRequest"' in page and 'href="#ChatRequest"' in page
