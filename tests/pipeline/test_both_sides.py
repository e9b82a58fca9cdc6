"""Django's side and Spark's side say the same of the log: where it ends, where a moment is in it, and lag."""

from __future__ import annotations

import datetime

import pytest

from django_mysqlqueue import Message, models, publish_many
from django_mysqlqueue.db import log_queries
from django_mysqlqueue.models import QueueMessage, Sequencer
from pyspark_mysqlqueue import log_offsets, log_schema, reading
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.options import SourceOptions
from tests.support import garbage
from tests.support.factories import QueueMessageFactory
from tests.support.harness import USING, Sub, handler
from tests.support.internals import Session, log

START = 1_790_000_000_000
"""Epoch milliseconds."""
MINUTE = 60_000


def moment(milliseconds: int) -> datetime.datetime:
    return log_offsets.EPOCH + datetime.timedelta(milliseconds=milliseconds)


def end(place: Place) -> int:
    with place.connect() as database:
        spark = log_offsets.highest(database)
    assert log.end_of_log(Session(USING)) == spark
    return spark


def first_since(place: Place, milliseconds: int) -> int:
    with place.connect() as database:
        spark = log_offsets.first_since(database, moment(milliseconds))
    assert log.first_since(Session(USING), milliseconds) == spark
    return spark


@pytest.fixture
def rows(place):
    """Ten messages, a minute between each and the next."""
    return [QueueMessageFactory(published_at=START + number * MINUTE).offset for number in range(10)]


def test_the_tables_are_those_of_the_models():
    for name, model in (
        (log_queries.LOG, QueueMessage),
        (log_queries.SEQUENCER, Sequencer),
        (log_queries.OFFSETS, models.ConsumerOffset),
        (log_queries.STATE, models.DeliveryState),
    ):
        assert name == model._meta.db_table
    assert log_queries.BY_PARTITION in {index.name for index in QueueMessage._meta.indexes}
    assert log_queries.BY_DUE in {index.name for index in models.DeliveryState._meta.indexes}


def test_an_empty_log(place):
    Sequencer.objects.all().delete()
    assert end(place) == 0
    assert first_since(place, START) == 1


def test_a_log_that_gc_has_emptied_ends_where_it_ended(place, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", (Message(number, key="k") for number in range(5)))
    sub = Sub(handler())
    sub.settle()
    sub.leave()
    last = end(place)
    assert last == QueueMessage.objects.latest("offset").offset
    garbage.collect(USING)
    assert not QueueMessage.objects.exists()
    assert end(place) == last
    # Nothing is left of any time, so every moment is behind the end: what a stream begins with is new.
    assert first_since(place, 0) == first_since(place, START * 2) == last + 1


def test_a_read_from_a_moment_after_all_that_gc_has_deleted_misses_nothing(place, settings):
    settings.MYSQLQUEUE = {"RETENTION": 0}
    publish_many("t", range(5))
    sub = Sub(handler())
    sub.settle()
    sub.leave()
    garbage.collect(USING)
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    options = SourceOptions(place, start=later)
    with place.connect() as database:
        last = log_offsets.highest(database)
        assert log_offsets.batch(database, options) == log_offsets.Range(last, last, last)
        assert log_offsets.initial(database, options) == {"offset": last}
        reading.check_complete(database, reading.Query(log_schema.NAMES, watch_above=last), last)
        # A message that comes after the end was read does not move the beginning behind that end.
        QueueMessageFactory(offset=last + 3)
        assert log_offsets.before(database, later, last) == last


def test_a_gap_at_the_front(place, rows):
    QueueMessage.objects.filter(offset__lte=rows[3]).delete()
    assert end(place) == rows[-1]
    assert first_since(place, 0) == first_since(place, START + 2 * MINUTE) == rows[4]


def test_a_gap_at_the_end(place, rows):
    Sequencer.objects.update_or_create(id=1, defaults={"last_offset": rows[-1]})
    QueueMessage.objects.filter(offset__gte=rows[7]).delete()
    assert end(place) == rows[-1]
    assert first_since(place, START + 6 * MINUTE) == rows[6]
    assert first_since(place, START + 7 * MINUTE) == rows[-1] + 1


def test_a_moment_between_two_messages(place, rows):
    QueueMessage.objects.filter(offset=rows[5]).delete()
    assert first_since(place, START) == rows[0]
    assert first_since(place, START + MINUTE) == rows[1]
    assert first_since(place, START + MINUTE + 1) == first_since(place, START + 2 * MINUTE - 1) == rows[2]
    assert first_since(place, START + 4 * MINUTE + 1) == rows[4] + 1  # of the gap: what follows is newer
    assert first_since(place, START + 9 * MINUTE + 1) == rows[-1] + 1
