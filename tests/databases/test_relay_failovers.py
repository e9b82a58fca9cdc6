"""The relay while one of its databases goes back to an earlier state, at any statement of a pass."""

from __future__ import annotations

import contextlib
import itertools

import pytest
from django.db import OperationalError, connections

from django_mysqlqueue import publish
from django_mysqlqueue.exceptions import CommitOutcomeUnknown
from django_mysqlqueue.models import QueueMessage, RelayPosition, RelayWatermark, Sequencer
from tests.support import garbage
from tests.support.backups import LOG, Backup
from tests.support.internals import (
    LogPlace,
    NotInserted,
    Refusal,
    Relayed,
    Session,
    Watermark,
    relay,
    relaying,
    sequence,
    watermark,
)

SOURCE, TARGET = "default", "queue"


@pytest.fixture(autouse=True)
def _topics(queue_db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0, "TOPICS": {"orders": {"DATABASE": TARGET}}}


class Lost(OperationalError):
    """The server has ended the connection."""


class FailsOver:
    """Calls a function at the n-th statement of either database, or before or after its COMMIT.

    If the database that fails over has an open transaction, it is lost, and the pass with it.
    """

    def __init__(self, number, alias, function, monkeypatch):
        self.left, self.alias, self.function = number, alias, function
        self.stack = contextlib.ExitStack()
        """What happens at the end of the pass."""
        for one in (SOURCE, TARGET):
            connection = connections[one]
            connection.ensure_connection()
            monkeypatch.setattr(connection, "_commit", self._around(connection._commit))
            self.stack.enter_context(connection.execute_wrapper(self._before))

    @property
    def has_happened(self):
        return self.left < 0

    def _before(self, execute, sql, params, many, context):
        self._count(in_transaction=connections[self.alias].in_atomic_block)
        return execute(sql, params, many, context)

    def _around(self, commit):
        def counted():
            self._count(in_transaction=commit.__self__.alias == self.alias)
            commit()
            self._count(in_transaction=False)

        return counted

    def _count(self, *, in_transaction):
        self.left -= 1
        if self.left != -1:
            return
        if not in_transaction:
            self.function()
            return
        self.stack.callback(self.function)
        raise Lost(2013, "Lost connection to server during query")


def send(*payloads):
    """Each of them after a message of another topic, which shares the offsets."""
    for payload in payloads:
        for topic in ("other", "orders"):
            publish(topic, payload, via=SOURCE, on_mismatch="commit_now")
    sequence(SOURCE)


def relay_all(rows):
    """Runs passes until nothing is left, or the connection is lost."""
    with contextlib.suppress(Lost, NotInserted, CommitOutcomeUnknown):
        while relay(SOURCE, TARGET, max_rows=rows).more:
            pass


def pass_on():
    reasons = []
    for _ in range(100):
        done = relay(SOURCE, TARGET)
        reasons += [done.repeats] * bool(done.repeats)
        if not done.more:
            return reasons
    raise AssertionError("the relay never ends")


def arrived():
    sequence(TARGET)
    rows = QueueMessage.objects.using(TARGET).filter(topic="orders").order_by("offset")
    return [bytes(payload).decode() for payload in rows.values_list("payload", flat=True)]


def check(sent, *, in_order):
    found = arrived()
    assert len(set(found)) == len(found), "each once"
    assert [one for one in sent if one not in found] == [], "none is missing"
    if in_order:
        assert [one for one in found if one in sent] == sent


@pytest.mark.promise("Several databases")
@pytest.mark.parametrize(("rows", "later"), [(3, 0), (3, 12), (relaying.BATCH_ROWS, 12)])
def test_a_source_that_goes_back_at_any_statement_loses_nothing_that_it_has(db, monkeypatch, rows, later):
    """Right after the failover, other messages have the offsets of those that it has lost."""
    number = itertools.count(1)
    monkeypatch.setattr(relaying, "PAGE", 12)
    sent, at, happened = [], 0, True
    while happened:
        before = [str(next(number)) for _ in range(4)]
        send(*map(int, before[:3]))
        pass_on()
        send(int(before[3]))
        backup = Backup(SOURCE)
        send(*(next(number) for _ in range(5)))
        after = [str(next(number)) for _ in range(later + 3)]

        def fail_over(backup=backup, after=after):
            backup.restore()
            send(*map(int, after[:later]))

        with monkeypatch.context() as patched:
            failover = FailsOver(at, SOURCE, fail_over, patched)
            with failover.stack:
                relay_all(rows)
        happened = failover.has_happened
        if not happened:
            fail_over()
        garbage.collect(SOURCE)
        send(*map(int, after[later:]))
        pass_on()
        sent += [*before, *after]
        check(sent, in_order=True)
        assert pass_on() == []
        at += 1
    assert at > 12


@pytest.mark.promise("Several databases")
@pytest.mark.parametrize("rows", [relaying.BATCH_ROWS, 3])
def test_a_target_that_goes_back_at_any_statement_receives_everything(db, monkeypatch, settings, rows):
    settings.MYSQLQUEUE = {"RETENTION": 60, "TOPICS": {"orders": {"DATABASE": TARGET}}}
    number = itertools.count(1)
    sent, at, happened = [], 0, True
    while happened:
        part = [str(next(number)) for _ in range(8)]
        send(*map(int, part[:3]))
        pass_on()
        arrived()
        backup = Backup(TARGET)
        send(*map(int, part[3:]))
        with monkeypatch.context() as patched:
            failover = FailsOver(at, TARGET, backup.restore, patched)
            with failover.stack:
                relay_all(rows)
        happened = failover.has_happened
        if not happened:
            backup.restore()
        pass_on()
        sent += part
        check(sent, in_order=True)
        assert pass_on() == []
        at += 1
    assert at > 12


def test_a_source_that_went_back_is_told(db):
    send(1)
    pass_on()
    backup = Backup(SOURCE)
    send(2, 3, 4)
    pass_on()
    backup.restore()
    send(5)
    assert pass_on() == ["the source was restored to an earlier state"]
    check(["1", "2", "3", "4", "5"], in_order=True)


def test_a_watermark_above_the_end_of_the_log_counts_for_nothing(db):
    """Somebody has restored the log without it."""
    send(1, 2, 3)
    pass_on()
    backup = Backup(SOURCE)
    send(4, 5, 6)
    pass_on()
    backup.restore(LOG, "queue_sequencer")
    assert RelayWatermark.objects.get().read_offset > Sequencer.objects.get().last_offset
    assert watermark(Session(SOURCE), TARGET) == Watermark()
    assert garbage.collect(SOURCE).messages == 3, "those of the other topic"
    assert relay(SOURCE, TARGET) == Relayed(more=True, repeats="the source was restored to an earlier state")
    send(7)
    assert pass_on() == []
    check(["1", "2", "3", "4", "5", "6", "7"], in_order=True)


def test_a_position_whose_offset_has_another_message_is_not_believed(db, settings):
    """Both databases were restored: the target to a state in which it had received another log."""
    settings.MYSQLQUEUE = {"RETENTION": 60, "TOPICS": {"orders": {"DATABASE": TARGET}}}
    send(1)
    pass_on()
    arrived()
    source, target = Backup(SOURCE), Backup(TARGET)
    send(2, 3)
    pass_on()
    later = Backup(SOURCE)
    source.restore()
    target.restore()
    send(4)
    pass_on()
    later.restore()
    assert RelayPosition.objects.using(TARGET).get().relayed_offset < RelayWatermark.objects.get().relayed_offset
    assert pass_on() == ["the source and the target were restored to earlier states"]
    assert sorted(arrived()) == ["1", "2", "3", "4"]


def test_a_refusal_is_not_stored_in_another_log(db):
    send(1)
    (row,) = QueueMessage.objects.filter(topic="orders@queue")
    place = LogPlace(row.offset, row.topic, row.partition_key, row.size, row.message_id)
    relaying.note_refusal(SOURCE, TARGET, place._replace(id="another"), "an error")
    assert relaying.refusal(Session(SOURCE), TARGET) == Refusal()
    relaying.note_refusal(SOURCE, TARGET, place, "an error")
    assert relaying.refusal(Session(SOURCE), TARGET) == Refusal(row.offset, "an error")
