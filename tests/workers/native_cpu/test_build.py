"""The build: kept, and when there is none, said in one typed error."""

from __future__ import annotations

import pytest

from tests.workers.native_rig import native_library
from workers.backends.native_cpu.build import RELEASE, Variant, build_library
from workers.backends.native_cpu.errors import NativeCpuUnavailable
from workers.backends.native_cpu.library import load_library


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeCpuUnavailable, match="no C\\+\\+ compiler found: looked for no-such-compiler"):
        build_library(RELEASE)


def test_what_does_not_compile_is_one_line() -> None:
    native_library()
    with pytest.raises(NativeCpuUnavailable, match="does not compile") as caught:
        build_library(Variant("broken", ("-fno-such-flag",)))
    assert "no-such-flag" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_reference_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    native_library()
    monkeypatch.setenv("HEADRACE_CPU_ISA", "reference")
    with pytest.raises(NativeCpuUnavailable, match="HEADRACE_CPU_ISA"):
        load_library()


def test_a_second_build_is_the_first() -> None:
    assert native_library().path == build_library(RELEASE)
