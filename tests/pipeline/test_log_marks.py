"""A position is compared with a log: the same one, one that went back, another one, or nobody knows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from django_mysqlqueue import publish_many
from django_mysqlqueue.models import LogMark, QueueMessage, Sequencer
from pyspark_mysqlqueue import log_marks
from pyspark_mysqlqueue.errors import DataLossError
from tests.support.backups import Backup
from tests.support.harness import USING, sequence
from tests.support.internals import identify


def grow(messages=3, *, marked=True):
    """Appends messages; returns the end of the log."""
    identify(USING)
    publish_many("t", range(messages))
    if marked:
        Sequencer.objects.update(marked_at=0)
    sequence()
    return QueueMessage.objects.latest("offset").offset


def here(place, offset):
    with place.connect() as database:
        return log_marks.position(database, offset)


def relation(place, position):
    with place.connect() as database:
        return log_marks.relation(database, position)


@pytest.fixture
def end(place):
    """The end of a log with a mark below it."""
    grow()
    return grow(marked=False)


def test_a_position_has_the_newest_mark_up_to_its_offset(place, end):
    first = LogMark.objects.get()
    assert here(place, end) == log_marks.Position(
        end, Sequencer.objects.get().log_id, 0, first.marked_offset, first.mark
    )
    assert here(place, first.marked_offset - 1).marked_offset == 0
    grow()
    second = LogMark.objects.latest("marked_offset")
    assert here(place, end).mark == first.mark
    assert here(place, second.marked_offset).mark == second.mark


def test_the_same_log(place, end):
    reader = here(place, end)
    assert relation(place, reader) == "same"
    grow()
    assert relation(place, reader) == "same"
    QueueMessage.objects.all().delete()
    assert relation(place, reader) == "same"


def test_a_mark_at_the_offset_may_follow_the_position(place, end):
    reader = here(place, end)
    LogMark.objects.create(marked_offset=end, mark=1)
    assert relation(place, reader) == "same"


@pytest.mark.parametrize("marked", [True, False])
def test_a_log_that_was_restored_and_has_grown_past_the_position(place, end, marked):
    """The mark of the position is gone; or it is there, and one has followed that the position does not have."""
    backup = Backup(USING)
    reader = here(place, grow(marked=marked))
    backup.restore()
    assert relation(place, reader) == "went back"
    grow(1)
    while grow(1) < reader.offset + 3:
        pass
    assert relation(place, reader) == "went back"


def test_a_log_that_was_restored_is_the_same_for_who_has_read_no_more_than_the_backup(place, end):
    reader = here(place, end)
    backup = Backup(USING)
    grow()
    backup.restore()
    grow(7)
    assert relation(place, reader) == "same"


def test_a_log_that_lost_its_first_marks(place):
    """The position had no mark."""
    reader = here(place, grow(marked=False))
    assert relation(place, reader) == "unknown"
    LogMark.objects.create(marked_offset=reader.offset - 1, mark=1)
    assert relation(place, reader) == "went back"


def test_an_epoch_that_an_operator_has_raised(place, end):
    reader = here(place, end)
    Sequencer.objects.update(epoch=1)
    assert relation(place, reader) == "went back"
    assert here(place, end).name == f"{reader.log} (epoch 1)"


def test_another_log(place, end):
    reader = here(place, end)
    Sequencer.objects.update(log_id="another")
    assert relation(place, reader) == "another"


def test_a_mark_that_gc_has_pruned(place, end):
    reader = here(place, end)
    LogMark.objects.all().delete()
    assert relation(place, reader) == "unknown"
    grow()
    assert relation(place, reader) == "unknown"


def test_a_log_without_a_row(place):
    """As after a flush."""
    Sequencer.objects.all().delete()
    assert here(place, 0) == log_marks.Position(0)
    assert relation(place, log_marks.Position(0)) == "unknown"
    assert relation(place, log_marks.Position(1)) == "went back"
    assert relation(place, log_marks.Position(1, "a log")) == "another"
    grow()
    assert relation(place, log_marks.Position(0)) == "unknown"


def test_a_position_survives_json(place, end):
    reader = here(place, end)
    with place.connect() as database:
        offset = log_marks.stored(database, {"offset": end, "collected": 7})
    assert offset["collected"] == 7
    assert log_marks.Position.of(json.loads(json.dumps(offset))) == reader


def checked(place, position, **options):
    with place.connect() as database:
        return log_marks.checked(database, position, **options)


def test_who_accepts_data_loss_is_told_what_is_skipped(place, end, caplog):
    reader = here(place, end)
    assert checked(place, reader, fail_on_data_loss=False) == reader
    assert caplog.messages == []
    Sequencer.objects.update(log_id="another")
    assert checked(place, reader, fail_on_data_loss=False) == here(place, end)
    (message,) = caplog.messages
    assert message == (
        f"this database has the log another, up to offset {end}, but the reader is at offset {end} of the log "
        f"{reader.log}; it continues after offset {end}, and skips what this log has up to there"
    )
    far = dataclasses.replace(reader, offset=end + 5)
    assert checked(place, far, fail_on_data_loss=False) == here(place, end)
    with pytest.raises(DataLossError, match="set failOnDataLoss to false"):
        checked(place, far, fail_on_data_loss=True)
