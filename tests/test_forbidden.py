"""What this code must never do with bytes of others: unpickle, evaluate, or run code that came with a model."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "scheduler", "workers", "frontend", "headrace")
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
}
ARGUMENTS = {"trust_remote_code", "allow_pickle", "shell"}


def violations(source: str) -> list[str]:
    """``line: what`` for each."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").partition(".")[0]}
        else:
            names = set()
        found += [f"{node.lineno}: imports {name}" for name in names & MODULES]  # type: ignore[attr-defined]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [f"{node.lineno}: calls {called}"] if called in CALLS else []
            found += [
                f"{node.lineno}: {keyword.arg} is given"
                for keyword in node.keywords
                if keyword.arg in ARGUMENTS and ast.unparse(keyword.value) != "False"
            ]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_code_of_others_is_run(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    bad = {str(file.relative_to(ROOT)): found for file in files if (found := violations(file.read_text()))}
    assert not bad


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval(text)",
        "import torch\ntorch.load(path)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "np.load(path, allow_pickle=flag)",
        "subprocess.run(line, shell=True)",
    ],
)
def test_each_of_these_would_be_found(source: str) -> None:
    assert violations(source)


def test_what_is_allowed_is_not_found() -> None:
    assert not violations("import msgspec\nre.compile(x)\nsubprocess.run(line, shell=False)")
