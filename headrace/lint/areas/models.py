"""/v1/models and /v1/models/{id}."""

from __future__ import annotations

import urllib.parse
from typing import Any

from headrace.lint import shapes
from headrace.lint.exchange import Exchange, offered_route, refused
from headrace.lint.session import Session
from headrace.lint.verdicts import NotOffered, Wrong, check


def _listed(session: Session) -> tuple[Exchange, list[dict[str, Any]]]:
    exchange = offered_route(session.get("/v1/models"))
    data = exchange.json.get("data")
    if exchange.status != 200 or exchange.json.get("object") != "list" or not isinstance(data, list):
        raise Wrong("not {object: list, data: […]}", exchange)
    if not data or not all(isinstance(entry, dict) for entry in data):
        raise Wrong("data is not a list of models", exchange)
    return exchange, data


def _mine(session: Session) -> tuple[Exchange, dict[str, Any]]:
    exchange, data = _listed(session)
    found = next((entry for entry in data if entry.get("id") == session.target.model), None)
    if found is None:
        raise NotOffered(f"{session.target.model!r} is not listed")
    return exchange, found


@check("1", "A model has id, object, created and owned_by.")
def cards(session: Session) -> None:
    exchange, data = _listed(session)
    for entry in data:
        good = isinstance(entry.get("id"), str) and entry.get("object") == "model"
        if not good or not shapes.is_count(entry.get("created")) or not isinstance(entry.get("owned_by"), str):
            raise Wrong(f"a model is {entry!r}"[:300], exchange)


@check("1", "A model says how long its context is.")
def max_model_len(session: Session) -> None:
    exchange, entry = _mine(session)
    if "max_model_len" not in entry:
        raise NotOffered("no max_model_len")
    if not shapes.is_count(entry["max_model_len"]) or entry["max_model_len"] < 1:
        raise Wrong(f"max_model_len is {entry['max_model_len']!r}", exchange)


@check("1", "A model's status is ready, loading or unavailable.")
def status(session: Session) -> None:
    exchange, entry = _mine(session)
    if "status" not in entry:
        raise NotOffered("no status")
    if entry["status"] not in ("ready", "loading", "unavailable"):
        raise Wrong(f"status is {entry['status']!r}", exchange)


@check("1", "A model's capabilities say tools, reasoning and json, each true or false.")
def capabilities(session: Session) -> None:
    exchange, entry = _mine(session)
    given = entry.get("capabilities")
    if given is None:
        raise NotOffered("no capabilities")
    if not isinstance(given, dict) or not all(type(given.get(name)) is bool for name in ("tools", "reasoning", "json")):
        raise Wrong(f"capabilities are {given!r}", exchange)


@check("1", "Each model can be asked for by its id, and is as in the list.")
def one_model(session: Session) -> None:
    _, data = _listed(session)
    for entry in data[:4]:
        exchange = offered_route(session.get(f"/v1/models/{urllib.parse.quote(str(entry.get('id')), safe='/')}"))
        if exchange.status != 200 or exchange.json.get("id") != entry.get("id"):
            raise Wrong(f"{entry.get('id')!r} is listed and not found", exchange)


@check("5", "An unknown model is a 404 model_not_found.")
def unknown_model(session: Session) -> None:
    exchange = session.get("/v1/models/no-such-model")
    if exchange.status == 405:
        raise NotOffered("no such route")
    refused(exchange, 404, code="model_not_found")


@check("5", "An id with odd characters is a 404 too, never more.")
def odd_ids(session: Session) -> None:
    for name in ("%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "%ff%fe", "a%20b", "%F0%9F%A6%A6", "x" * 2000):
        refused(session.get(f"/v1/models/{name}"), (400, 404, 414))


@check("3", "The model of an answer is a name that is listed.")
def echoed_name(session: Session) -> None:
    _, data = _listed(session)
    exchange = session.chat(max_tokens=1)
    if exchange.status == 200 and exchange.json.get("model") not in [entry.get("id") for entry in data]:
        raise Wrong(f"model is {exchange.json.get('model')!r}", exchange)
