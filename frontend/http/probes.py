"""Small answers about the server itself: models, health, version and load."""

from __future__ import annotations

import importlib.metadata

import msgspec

from frontend.service import Frontend


class Capabilities(msgspec.Struct):
    """What a model can be asked for besides text."""

    tools: bool
    reasoning: bool
    json: bool


class ModelCard(msgspec.Struct):
    """One entry of /v1/models."""

    id: str
    created: int
    max_model_len: int
    status: str
    """``ready``, ``loading`` or ``unavailable``."""
    capabilities: Capabilities
    root: str
    object: str = "model"
    owned_by: str = "headrace"


class ModelList(msgspec.Struct):
    """The answer of /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Alive(msgspec.Struct):
    """The answer of /livez."""

    status: str = "alive"


class Ready(msgspec.Struct):
    """The answer of /readyz."""

    model: str
    model_status: str
    status: str = "ready"


class VersionInfo(msgspec.Struct):
    """The answer of /version."""

    version: str
    server: str = "headrace"


class GroupReport(msgspec.Struct):
    """One group of workers."""

    group: str
    ready: bool
    requests_running: int
    requests_waiting: int
    kv_usage: float
    """Share of KV blocks in use, 0 … 1."""


class LoadReport(msgspec.Struct):
    """The answer of /load: this frontend's own load, and the scheduler's as it last told it."""

    server_load: int
    """HTTP requests that this frontend is answering, this one apart."""
    requests_running: int
    requests_waiting: int
    waiting_tokens: int
    groups: list[GroupReport]


def model_card(frontend: Frontend, name: str) -> ModelCard:
    """A served model under one of its names."""
    return ModelCard(
        id=name,
        created=frontend.created,
        max_model_len=frontend.preparer.context(frontend.client.model),
        status=frontend.client.status,
        capabilities=Capabilities(tools=False, reasoning=False, json=False),
        root=frontend.name,
    )


def load_report(frontend: Frontend) -> LoadReport:
    """How busy things are now."""
    load = frontend.client.load
    groups = load.groups if load is not None else ()
    return LoadReport(
        server_load=max(0, frontend.under_way - 1),
        requests_running=load.requests_running if load is not None else 0,
        requests_waiting=load.requests_waiting if load is not None else 0,
        waiting_tokens=load.waiting_tokens if load is not None else 0,
        groups=[
            GroupReport(
                group=group.group,
                ready=group.ready,
                requests_running=group.requests_running,
                requests_waiting=group.requests_waiting,
                kv_usage=group.blocks_used / group.blocks_total if group.blocks_total else 0.0,
            )
            for group in groups
        ],
    )


def version() -> str:
    """Of the installed distribution."""
    return importlib.metadata.version("headrace")
