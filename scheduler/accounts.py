"""What each tenant is owed of the next tokens: the deficits of the round robin.

An account lives while its tenant has something waiting or running; an idle tenant keeps neither credit nor debt, so
there are never more accounts than requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.block_pool import IntegrityError
from scheduler.requests import Sequence

MOST_DEBT = 64
"""In quanta. Output is charged when a request ends: what ends while nobody else waits is soon forgotten."""


@dataclass(eq=False, slots=True)
class Account:
    """One tenant's."""

    deficit: int = 0
    """Tokens it may still run in its turn; below 0 after a request larger than that, or after long outputs."""
    waiting: int = 0
    open: int = 0
    """Started and not ended, preempted ones included."""


class TenantAccounts:
    """Accounts by tenant, and what was charged so far for each choice that has started."""

    def __init__(self, quantum: int) -> None:
        self._accounts: dict[str, Account] = {}
        self._charged: dict[Sequence, int] = {}
        """By choice: output tokens that its tenant need not pay any more."""
        self._lowest = -MOST_DEBT * quantum

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, tenant: str) -> Account:
        """The account of a tenant that has something here."""
        return self._accounts[tenant]

    def waits(self, tenant: str) -> Account:
        """One more of a tenant's waits."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
        account.waiting += 1
        return account

    def waits_no_more(self, tenant: str) -> None:
        """One less."""
        account = self._accounts[tenant]
        account.waiting -= 1
        self._close_if_idle(tenant, account)

    def started(self, sequence: Sequence, *, charge: bool) -> None:
        """It runs: its prefill is charged now, its output when it ends."""
        if sequence in self._charged:
            return
        tenant = sequence.request.tenant
        account = self._accounts.setdefault(tenant, Account())
        account.open += 1
        account.deficit -= sequence.length if charge else 0
        self._charged[sequence] = len(sequence.output)

    def ended(self, sequence: Sequence) -> None:
        """It will not run any more; one that never did changes nothing."""
        paid = self._charged.pop(sequence, None)
        if paid is None:
            return
        tenant = sequence.request.tenant
        account = self._accounts[tenant]
        account.open -= 1
        account.deficit = max(account.deficit - (len(sequence.output) - paid), self._lowest)
        self._close_if_idle(tenant, account)

    def _close_if_idle(self, tenant: str, account: Account) -> None:
        if not (account.waiting or account.open):
            del self._accounts[tenant]

    def check_integrity(self, waiting: Iterable[Sequence]) -> None:
        """Raise IntegrityError unless there is an account for exactly those tenants that have something here."""
        wait = Counter(sequence.request.tenant for sequence in waiting)
        run = Counter(sequence.request.tenant for sequence in self._charged)
        if self._accounts.keys() != wait.keys() | run.keys():
            raise IntegrityError(f"{len(self._accounts)} accounts for {len(wait.keys() | run.keys())} tenants")
        for tenant, account in self._accounts.items():
            if (account.waiting, account.open) != (wait[tenant], run[tenant]):
                raise IntegrityError(f"an account has {account}, of {wait[tenant]} waiting and {run[tenant]} open")
