from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients.answers import ALIAS, MODEL, write_script
from tests.clients.node import Node
from tests.end_to_end.serve_process import ServeProcess


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One server for all clients: every process of the real architecture, and an engine whose answers are known."""
    script = write_script(tmp_path_factory.mktemp("clients") / "script.jsonl")
    arguments = ("--launcher", "local", "--engine", "scripted", "--tokenizer", "byte", "--engine-script", str(script))
    with ServeProcess(*arguments, "--served-model-name", MODEL, ALIAS) as server:
        yield server


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Node:
    """Node with the npm clients; skips when they are not to be had."""
    return Node.or_skip(tmp_path_factory.mktemp("node"))
