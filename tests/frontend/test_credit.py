"""The account of credit between two Loads."""

from __future__ import annotations

import pytest

from frontend.errors import ApiError
from frontend.session.credit import CreditAccount
from protocol.frontend import Credit


def account(requests: int, tokens: int = 1000) -> CreditAccount:
    credit = CreditAccount()
    credit.opened(Credit(requests, tokens))
    return credit


def is_open(credit: CreditAccount, priority: int = 0) -> bool:
    try:
        with credit.reserved(1, priority):
            return True
    except ApiError as error:
        assert error.status == 429 and "Retry-After" in error.headers
        return False


def test_what_is_being_prepared_counts() -> None:
    credit = account(2)
    with credit.reserved(2, 0):
        assert not is_open(credit)
    assert is_open(credit)


def test_what_is_on_its_way_counts_until_a_load_says_it_was_read() -> None:
    credit = account(3)
    credit.sent(3, 30)
    assert not is_open(credit)
    credit.granted(Credit(1, 1000, taken_requests=2, taken_tokens=20))
    assert not is_open(credit), "the third will take the one that is left"
    credit.granted(Credit(1, 1000, taken_requests=3, taken_tokens=30))
    assert is_open(credit)


def test_tokens_run_out_too() -> None:
    credit = account(100, tokens=50)
    credit.sent(1, 50)
    assert not is_open(credit)


def test_a_new_session_counts_from_nothing() -> None:
    credit = account(1)
    credit.sent(5, 50)
    credit.opened(Credit(1, 1000))
    assert is_open(credit)
    assert credit.statistics().requests_left == 1


def test_an_urgent_request_comes_in_while_something_can_give_way() -> None:
    credit = CreditAccount()
    credit.opened(Credit(0, 0, displaces=2))
    assert is_open(credit, priority=1) and not is_open(credit, priority=2)


def test_a_request_that_fails_while_it_is_prepared_gives_its_credit_back() -> None:
    credit = account(1)
    with pytest.raises(ValueError), credit.reserved(1, 0):
        raise ValueError
    assert is_open(credit)
