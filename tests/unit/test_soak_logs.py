"""The soak's checks find unexpected lines of the logs."""

from __future__ import annotations

import pytest
from soak import logs, plan
from soak.facts import Trouble

pytestmark = pytest.mark.any_engine

EXPECTED = """\
2026-01-01 10:00:00,000 WARNING poller.failed error="OperationalError: (2006, 'Server has gone away')" failures=1
2026-01-01 10:00:00,000 ERROR [1] group.failed group=g error="OperationalError: (1205, 'Lock wait timeout')" failures=1
2026-01-01 10:00:00,000 ERROR on_commit.failed group=g error="django.db.utils.OperationalError: (2013, 'Lost')"
2026-01-01 10:00:00,000 ERROR release.failed name=s:1:a error="OperationalError: (2002, 'Cannot connect')"
2026-01-01 10:00:00,000 ERROR [2] delivery.dead_lettered group=g error='soak.app.subscribers.Planned: poison'
Traceback (most recent call last):
  File "handling.py", line 1, in handle
soak.app.subscribers.Planned: poison
MySQLdb.OperationalError: (2013, 'Lost connection to server during query')
django.db.utils.OperationalError: (1927, 'Connection was killed')
CommandError: The database 'default' does not answer: (2002, "Can't connect to local server")
django_mysqlqueue.exceptions.CommitOutcomeUnknown: COMMIT on 'default' failed: (2006, '')
"""
STRANGE = [
    "2026-01-01 10:00:00,000 ERROR handler_thread.failed group=g topic=t",
    "2026-01-01 10:00:00,000 CRITICAL [1] poller.died",
    "2026-01-01 10:00:00,000 WARNING poller.failed error=\"OperationalError: (1146, 'no such table')\" failures=1",
    "2026-01-01 10:00:00,000 ERROR group.failed group=g error=\"OperationalError: (2006, 'gone')\"",
    "2026-01-01 10:00:00,000 ERROR group.broken group=g topic=t error='KeyError: 5' failures=1",
    "2026-01-01 10:00:00,000 ERROR on_commit.failed group=g error='KeyError: 5'",
    "2026-01-01 10:00:00,000 ERROR release.failed name=s:1:a error='KeyError: 5'",
    "CommandError: There are no tables",
    "ValueError: too many values to unpack",
    "KeyError: 5",
    "django.db.transaction.TransactionManagementError: An error occurred in the current transaction.",
    'django.db.utils.IntegrityError: (1062, "Duplicate entry")',
    "AssertionError",
]
DEADLOCKED = [
    "2026-01-01 10:00:00,000 ERROR group.failed group=g error=\"OperationalError: (1213, 'in another language')\"",
    "django.db.utils.OperationalError: (1213, 'Deadlock found when trying to get lock; try restarting transaction')",
]


def test_logs_with_nothing_unexpected():
    assert [one.violations for one in logs.read_all({"a.log": EXPECTED.splitlines()}).verdicts()] == [(), ()]


@pytest.mark.parametrize("line", STRANGE)
def test_logs_with_something_unexpected(line):
    findings = logs.read_all({"a.log": [*EXPECTED.splitlines(), line]})
    assert findings.unexpected == [f"a.log:13: {line}"]
    assert not findings.deadlocks


@pytest.mark.parametrize("line", DEADLOCKED)
def test_logs_with_a_deadlock(line):
    findings = logs.read_all({"a.log": [*EXPECTED.splitlines(), line]})
    assert findings.deadlocks == [f"a.log:13: {line}"]


MARIADB = """\
2026-01-01 10:00:00 13 [Note] InnoDB: Transactions deadlock detected, dumping detailed information.
2026-01-01 10:00:00 13 [Note] InnoDB: *** (1) TRANSACTION:
2026-01-01 10:00:00 13 [Note] InnoDB: *** WAITING FOR THIS LOCK TO BE GRANTED:
RECORD LOCKS space id 32 page no 3 n bits 320 index PRIMARY of table `q`.`queue_offsets` trx id 7 lock_mode X waiting
2026-01-01 10:00:00 13 [Note] InnoDB: *** CONFLICTING WITH:
RECORD LOCKS space id 32 page no 3 n bits 320 index PRIMARY of table `q`.`queue_offsets` trx id 8 lock_mode X
2026-01-01 10:00:00 13 [Note] InnoDB: *** (2) TRANSACTION:
2026-01-01 10:00:00 13 [Note] InnoDB: *** WAITING FOR THIS LOCK TO BE GRANTED:
RECORD LOCKS space id 9 page no 3 n bits 32 index queue_leases_owner of table `q`.`leases` trx id 8 lock_mode X waiting
2026-01-01 10:00:00 13 [Note] InnoDB: *** WE ROLL BACK TRANSACTION (2)
"""
MYSQL = """\
2026-01-01T10:00:00.779480Z 0 [Note] [MY-012468] [InnoDB] Transactions deadlock detected, dumping detailed information.
2026-01-01T10:00:00.779541Z 0 [Note] [MY-012469] [InnoDB]  *** (1) HOLDS THE LOCK(S):
RECORD LOCKS space id 2 page no 4 n bits 72 index PRIMARY of table `q`.`queue_rollups` trx id 15 lock_mode X
2026-01-01T10:00:00.779603Z 0 [Note] [MY-012469] [InnoDB]  *** (1) WAITING FOR THIS LOCK TO BE GRANTED:
RECORD LOCKS space id 2 page no 4 n bits 72 index PRIMARY of table `q`.`queue_offsets` trx id 15 lock_mode X waiting
"""


def test_deadlocks_in_the_log_of_a_server_are_counted_by_index():
    lines = ["2026-01-01 10:00:00 0 [Note] InnoDB: Buffer pool(s) load completed", *(MARIADB * 2 + MYSQL).splitlines()]
    assert logs.server_deadlocks(lines) == {
        "leases.queue_leases_owner, queue_offsets.PRIMARY": 2,
        "queue_offsets.PRIMARY": 1,
    }
    assert not logs.server_deadlocks(lines[:1])


FAILING = [
    "2026-01-01 10:00:00,000 WARNING poller.failed error=Retry: failures=9",
    "2026-01-01 10:00:00,000 WARNING poller.failed error=\"OperationalError: (1205, 'Lock wait timeout')\" failures=1",
    "2026-01-01 10:00:00,000 WARNING [1] heartbeat.failed error=\"(2006, '')\" failures=1",
    "2026-01-01 10:00:00,000 ERROR heartbeat.withheld reason='the poller makes no progress' seconds=7.0",
    "django.db.utils.OperationalError: (1205, 'Lock wait timeout')",
]


@pytest.mark.parametrize("line", FAILING)
def test_logs_of_what_fails_all_the_time(line):
    findings = logs.read_all({"a.log": [line] * 300})
    assert not findings.unexpected
    few = [
        *(Trouble(plan.CUT, n, n, 0) for n in range(4)),
        *(Trouble(plan.FREEZE_CLAIM, n, n + 8, 5) for n in range(5)),
        *(Trouble(plan.KILL_SUBSCRIBER, n, n, 5) for n in range(8)),
        Trouble(plan.CRASH, 20, 21),
        Trouble(plan.IMPATIENT, 30, 42),
    ]
    for explained in (logs.Bounds(), logs.bounds(few, processes=6)):
        (broken,) = [one for one in findings.verdicts(explained) if not one.ok]
        assert broken.name == "no unexpected log lines"
    many = logs.bounds(few * 4, processes=6)
    assert all(one.ok for one in findings.verdicts(many))


def test_logs_of_one_that_never_recovers():
    """Of failures in a row every second power of two has a line: few lines are many failures."""
    lines = [f"2026-01-01 10:00:00,000 WARNING poller.failed error=Retry: failures={2**n}" for n in range(6)]
    findings = logs.read_all({"a.log": lines})
    crash = logs.bounds([Trouble(plan.CRASH, 0, 1, 0)], processes=6)
    (broken,) = [one for one in findings.verdicts(crash) if not one.ok]
    assert broken.violations == ("poller.failed: 32 consecutive failures, but only 20 are explained",)
    assert all(one.ok for one in findings.verdicts(logs.bounds([Trouble(plan.CRASH, 0, 9, 0)], processes=6)))


@pytest.mark.parametrize(
    ("event", "expected"),
    [("INFO [2] group.moved", True), ("ERROR [2] group.moved", False), ("ERROR [2] group.dropped", False)],
)
def test_groups_move_only_away_from_processes_with_the_new_settings(event, expected):
    line = f"2026-01-01 10:00:00,000 {event} group=g topic={plan.MOVED} database=default target=other"
    assert all(one.ok for one in logs.read_all({"a.log": [line]}).verdicts()) == expected
