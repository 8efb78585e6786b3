"""Actors are found again by name, and a wrong Ray address is said at once."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.launchers.base import LaunchError
from workers.launchers.ray_launcher import connect
from workers.launchers.ray_names import RankName, launch_name, parse_rank_name

names = st.text(min_size=1, max_size=20)
u64 = st.integers(1, 2**64 - 1)


@given(names, names, u64, st.integers(0, 1023))
def test_a_name_gives_its_parts_back(model, group, incarnation, rank) -> None:
    name = RankName(model, group, incarnation, rank)
    assert parse_rank_name(str(name)) == name
    assert str(name) == f"{launch_name(model, group, incarnation)}/{rank}"
    assert str(name).isascii() and str(name).isprintable()


@given(names, names, names, names, u64, u64)
def test_different_launches_have_different_names(model, group, other_model, other_group, one, two) -> None:
    same = (model, group, one) == (other_model, other_group, two)
    assert (launch_name(model, group, one) == launch_name(other_model, other_group, two)) == same


@pytest.mark.parametrize("name", ["", "a/b/c", "a/b/c/0", "a/b/1/x", "a/b/1/0/2", "someone-elses-actor"])
def test_other_actors_are_not_ranks(name) -> None:
    assert parse_rank_name(name) is None


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "local", "127.0.0.1", ":6379"])
def test_what_is_no_address_of_a_head_is_refused(address) -> None:
    with pytest.raises(LaunchError, match="HOST:PORT"):
        connect(address, "headrace-test")


def test_an_address_where_nobody_listens_is_said_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(LaunchError, match=f"cannot connect to Ray at 127.0.0.1:{port}: .*refused"):
        connect(f"127.0.0.1:{port}", "headrace-test")
