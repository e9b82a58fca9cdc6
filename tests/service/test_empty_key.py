"""The partition whose key is empty is not passed over."""

from __future__ import annotations

import pytest
from django.db import connection

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.models import ConsumerOffset, DeliveryState, QueueMessage
from tests.support import garbage
from tests.support.handlers import Recorder
from tests.support.harness import USING, Sub, handler, problems_found, sequence
from tests.support.internals import GroupRef, Session, Subscriber, Subset, get_settings, leasing, partitions

REF = GroupRef("g", "t")
WITHOUT_KEY = 3
"""Messages in the partition ''; more than a page, so that it does not go by unnoticed within one."""


@pytest.fixture
def log(db):
    publish_many("t", (Message(key, key=key) for key in ("b", "a", "a")))
    plain_sql()


def plain_sql() -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO queue_outbox (topic, payload) VALUES " + ", ".join(["('t', '1')"] * WITHOUT_KEY))
    sequence()


def settle_behind_everybody(mode: str = "ordered") -> None:
    """All is acked by atomic handlers whose process vanished before the watermarks moved."""
    gone = Sub(handler(mode=mode, atomic=True))
    gone.step()
    gone.work()
    assert set(DeliveryState.objects.values_list("partition_key", "acked")) == {("", True), ("a", True), ("b", True)}


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_have_each_partition_once(log, limit):
    settle_behind_everybody()
    session = Session(USING)

    def pages(read):
        after, found = None, []
        for _ in range(10):
            keys = read(after)
            found += keys
            if len(keys) < limit:
                return found
            after = keys[-1]
        raise AssertionError(f"it never ends: {found}")

    assert pages(lambda after: partitions.in_log(session, "t", after=after, limit=limit)) == ["", "a", "b"]
    assert pages(lambda after: partitions.in_state(session, REF, after=after, limit=limit)) == ["", "a", "b"]
    after, found = None, []
    for _ in range(10):
        keys, after = leasing.find_work(session, REF, after=after, limit=limit)
        found += keys
        if after is None:
            break
    assert found == ["", "a", "b"]


@pytest.mark.parametrize("mode", ["ordered", "shared"])
def test_forgotten_work_is_found(db, mode):
    """Nothing tells of it: the news of it was read and forgotten."""
    got = Recorder()
    sub = Sub(handler(mode=mode, function=got))
    sub.step()
    plain_sql()
    sub.poller._tail = QueueMessage.objects.latest("offset").offset
    sub.settle()
    assert not got.payloads
    for _ in sub.poller.maintenance._find_work():
        pass
    sub.settle()
    assert got.payloads == [1] * WITHOUT_KEY


def test_watermarks_are_swept(log, clock):
    settle_behind_everybody("shared")
    clock.advance(61)
    sub = Sub(handler(mode="shared"))
    for _ in sub.poller.maintenance._sweep_watermarks():
        pass
    assert not DeliveryState.objects.exists()
    assert all(row.offset_acked == row.offset_claimed > 0 for row in ConsumerOffset.objects.all())


def test_messages_are_collected_and_offsets_rows_forgotten(log, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    Sub(handler()).settle()
    assert set(ConsumerOffset.objects.values_list("partition_key", flat=True)) == {"", "a", "b"}
    found = garbage.collect(USING)
    assert (found.messages, found.offsets_rows) == (WITHOUT_KEY + 3, 3)
    assert not QueueMessage.objects.exists()
    assert not ConsumerOffset.objects.exists()


def test_a_drain_waits_for_it(db):
    one = handler()
    Sub(one)  # registers the group
    plain_sql()
    (draining,) = Subscriber({USING: {one.ref: one}}, get_settings(), drain=True).workers
    draining._look_for_rest()
    assert draining._rest


def test_a_problem_says_that_it_is_unserved(db, clock):
    """Its only subscriber works on the partitions of another subset."""
    sub = Sub(handler(), subset=Subset.parse(["a*"]))
    plain_sql()
    assert not problems_found()
    clock.advance(61)
    sub.heart.beat()
    (problem,) = problems_found()
    assert (problem.kind, problem.ref, problem.key) == ("unserved", REF, "")
