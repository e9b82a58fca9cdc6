"""GC waits for registered readers, until they are dropped."""

from __future__ import annotations

import pytest

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.inspection import find_problems, get_overview
from django_mysqlqueue.models import Operation, OutboxMessage, QueueMessage, Reader
from tests.support import garbage
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, Session, relay, relayed_topic, retention

pytestmark = pytest.mark.promise("Retention")

DAYS_MS = 86_400_000


@pytest.fixture
def offsets(db, settings):
    """The offsets of messages that a group has settled, and that nobody keeps."""
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    publish_many("t", (Message(number, key=f"k{number % 2}") for number in range(6)))
    Sub(handler()).settle()
    return list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))


def reads(name, offset, *topics, days=0):
    """A reader has read up to an offset, some days ago."""
    at = Session(USING).now() - days * DAYS_MS
    for topic in topics or ("",):
        Reader.objects.update_or_create(name=name, topic=topic, defaults={"read_offset": offset, "moved_at": at})


def kept():
    garbage.collect(USING)
    return list(QueueMessage.objects.order_by("offset").values_list("offset", flat=True))


@pytest.mark.parametrize("topics", [("t",), ("u", "t"), ()])
def test_gc_keeps_what_a_reader_has_not_read(offsets, topics):
    reads("lake", offsets[2], *topics)
    reads("other", offsets[4], *topics)
    assert kept() == offsets[3:]
    reads("lake", offsets[5], *topics)
    assert kept() == offsets[5:], "the slowest one decides"
    assert operations.drop_reader("other", actor="test").changed == 1
    assert kept() == []


def test_gc_does_not_wait_for_readers_of_other_topics(offsets):
    reads("lake", 0, "u")
    assert kept() == []


def test_a_topic_without_a_group_is_kept_for_a_reader_too(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    publish("t", 1)
    sequence()
    reads("lake", 0)
    assert len(kept()) == 1
    reads("lake", QueueMessage.objects.latest("offset").offset)
    assert kept() == []


def test_messages_for_another_database_are_kept_for_a_reader_of_all_topics(db, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0, "ORPHAN_RETENTION": 0}
    publish("far", 1)
    OutboxMessage.objects.update(topic=relayed_topic("far", USING))
    sequence()
    assert relay(USING, USING).messages == 1
    reads("lake", 0)
    assert len(kept()) == 1
    reads("lake", 10**6)
    assert kept() == []


def test_what_a_reader_needs_is_not_kept_for_a_group_alone(offsets):
    publish_many("t", range(3))
    sequence()
    ref = GroupRef("g", "t")

    def held():
        return retention.held_back_by(Session(USING), ref, most=100, rows=100, seconds=10)[0]

    assert held() == 3
    reads("lake", QueueMessage.objects.latest("offset").offset - 1)
    assert held() == 2


def test_a_preview_of_a_drop_counts_what_is_unread(offsets):
    reads("lake", offsets[-1] - 2, "t", "u")
    result = operations.drop_reader("lake", actor="ada", dry_run=True)
    assert (result.planned, result.changed) == (1, 0)
    assert result.summary[1].startswith("It has yet to read 2 offsets of the log.")
    assert Reader.objects.count() == 2
    done = operations.drop_reader("lake", actor="ada")
    assert done.summary == ("The reader lake is dropped.",)
    assert not Reader.objects.exists()
    (row,) = Operation.objects.all()
    assert (row.action, row.detail, row.actor, row.changed, row.ended_at > 0) == ("drop reader", "lake", "ada", 1, True)


def test_an_unknown_reader_is_refused_with_those_that_exist(db):
    reads("lake", 1)
    with pytest.raises(OperationRefused, match=r"no registered reader 'lade'\. Readers: lake\. Did you mean lake\?"):
        operations.drop_reader("lade", actor="test")


def problems():
    return [one for one in find_problems(get_overview()) if one.kind == "reader"]


def test_a_forgotten_reader_is_a_problem_if_it_keeps_messages(offsets):
    reads("lake", offsets[-1] - 2, "t", days=3)
    (problem,) = problems()
    assert problem.text == "The reader 'lake' has not read for 3 d. GC keeps 2 offsets of the log for it."
    assert (problem.severity, problem.topic) == (1, "t")
    reads("lake", offsets[-1] - 2, "t", days=1)
    assert problems() == []
    reads("lake", offsets[-1], "t", days=3)
    assert problems() == [], "it keeps nothing"
