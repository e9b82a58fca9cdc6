"""Fixtures of the tests without a database."""

from __future__ import annotations

import pytest
from soak import plan, records
from soak.facts import Entry, Evidence
from soak.records import Transaction

from django_mysqlqueue.options import conf
from tests.support.inbox import Queue
from tests.support.soak_runs import BEGAN, GROUPS, KEYS, TOTAL, name, run_of


@pytest.fixture
def queue(monkeypatch):
    return lambda **groups: Queue(monkeypatch, **groups)


@pytest.fixture(scope="module")
def evidence():
    runs = {group.name: run_of(group) for group in plan.GROUPS}
    return Evidence(
        ledger=[Entry(name(n), "p", n, KEYS[n % 3], scheduled=False, at=1000.0 + n) for n in range(TOTAL)],
        transactions=[
            *(Transaction(records.COMMITTED, "p", n, n + 1, at=BEGAN + n / 10) for n in range(TOTAL)),
            Transaction(records.ROLLED_BACK, "p", TOTAL, TOTAL + 3),
            Transaction(records.UNKNOWN, "p", TOTAL + 3, TOTAL + 4, "OperationalError: (2006, '')"),
        ],
        steps={group: steps for group, (steps, _, _) in runs.items()},
        effects={group: effects for group, (_, effects, _) in runs.items() if GROUPS[group].atomic},
        dead=[letter for _, _, dead in runs.values() for letter in dead],
    )


@pytest.fixture
def mysqlqueue(settings):
    """Sets MYSQLQUEUE and returns the problems that the checks would report."""

    def set_to(value):
        settings.MYSQLQUEUE = value
        return conf.problems()

    return set_to
