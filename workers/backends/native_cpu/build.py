"""Compiles the library once and keeps it in the cache, under a name made of sources, compiler and flags.

``python -m workers.backends.native_cpu.build`` builds it ahead of time, so that the first start need not.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.model_files.artefact_error import ArtefactError
from headrace.model_files.cache import cache_directory, private_directory
from workers.backends.native_cpu.errors import NativeCpuUnavailable

SOURCES = Path(__file__).parent / "native"

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=default", "-ffp-contract=off", "-Wall", "-Wextra")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c")
# gcc 12 takes its own intrinsics' undefined operands for a mistake.
_QUIET = ("-Wno-maybe-uninitialized", "-Wno-uninitialized")
_LEVEL_PREFIX = "level_"
_SECONDS = 300


@dataclass(frozen=True)
class Variant:
    """A way to build the library. The default one serves; tests have others."""

    name: str = "release"
    flags: tuple[str, ...] = ("-O2",)


RELEASE = Variant()
EMULATED_TILES = Variant("emulated", ("-O3", "-DHEADRACE_TILES_EMULATED"))
"""AMX's level over tile registers in plain C++: for testing it on CPUs without."""
SANITIZED = Variant(
    "sanitized", ("-O1", "-g", "-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-DHEADRACE_TILES_EMULATED")
)
"""To look for stray accesses by hand. Of the levels the emulated one: the compiler takes minutes for the other's."""


def build_library(variant: Variant = RELEASE) -> Path:
    """The compiled library; builds it when it is not in the cache. Raises NativeCpuUnavailable saying why it cannot."""
    compiler = _find_compiler()
    try:
        folder = private_directory(cache_directory() / "native_cpu")
        target = folder / f"headrace_cpu-{variant.name}-{_digest(compiler, variant)}.so"
        if target.is_file():
            return target
        # Whoever comes second waits for the first, then finds the file.
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                _build(compiler, variant, target)
    except (ArtefactError, OSError) as error:
        raise NativeCpuUnavailable(f"the native library cannot be built: {error}") from error
    return target


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise NativeCpuUnavailable(f"no C++ compiler found: looked for {wanted or ', '.join(_COMPILERS)}")


def _digest(compiler: str, variant: Variant) -> str:
    """Of everything that decides the compiled code."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=_SECONDS).stdout
    facts = [version, repr((_FLAGS, _AVX512, variant.flags)).encode()]
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            facts += [source.name.encode(), source.read_bytes()]
    digest = hashlib.blake2b(digest_size=10)
    for fact in facts:
        digest.update(len(fact).to_bytes(8, "little") + fact)
    return digest.hexdigest()


def _build(compiler: str, variant: Variant, target: Path) -> None:
    """Compile the files side by side, the longest first, and link; the library appears whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as made:
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: (not path.name.startswith(_LEVEL_PREFIX), path.name))
        objects = [Path(made) / f"{source.stem}.o" for source in sources]

        def compile_one(source: Path, to: Path) -> None:
            level = (*_AVX512, *_QUIET) if source.name.startswith(_LEVEL_PREFIX) else ()
            _run([compiler, *_FLAGS, *variant.flags, *level, "-c", str(source), "-o", str(to)])

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(compile_one, sources, objects))
        library = Path(made) / target.name
        linked = ["-shared", "-pthread", *map(str, objects), "-o", str(library)]
        _run([compiler, *_FLAGS, *variant.flags, *linked])
        library.replace(target)


def _run(command: Sequence[str]) -> None:
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as compiler:
        try:
            _, errors = compiler.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            os.killpg(compiler.pid, signal.SIGKILL)  # the driver's children too
            raise NativeCpuUnavailable(f"the compiler did not end within {_SECONDS} s") from error
    if compiler.returncode:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or [""]
        raise NativeCpuUnavailable(f"the native library does not compile: {lines[0][:300]}")


def main() -> int:
    """Build ahead of time; without a compiler say so, which is no failure: another backend serves."""
    try:
        path = build_library()
    except NativeCpuUnavailable as error:
        sys.stderr.write(f"native CPU backend: {error}; the torch reference will serve\n")
        return 0
    sys.stdout.write(f"native CPU backend: {path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
