"""What a seek says that it would replay and skip."""

from __future__ import annotations

import pytest

from django_mysqlqueue.models import ConsumerOffset, QueueMessage
from django_mysqlqueue.operations import seeking
from django_mysqlqueue.operations.limits import OperationLimits
from django_mysqlqueue.operations.seeking import Position
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler
from tests.support.internals import partitions
from tests.support.recorded_statements import recorded
from tests.support.scenarios import G, log, offsets_of


def test_the_preview_knows_what_is_settled_ahead_of_the_watermark(db):
    offsets = log(5, "a")
    sub = Sub(handler(function=lambda delivery: fail(delivery) if delivery.payload == 0 else None, max_attempts=None))
    sub.step()
    sub.work()
    sub.flush()
    assert seeking.preview(USING, G, Position(offsets[2])) == seeking.Preview(
        Position(offsets[2]), replayed=2, skipped=1
    )
    assert seeking.preview(USING, G, Position(0)).replayed == 4


def test_the_preview_counts_one_side_to_the_end_when_the_other_is_full(db):
    offsets = log(20, "ab")
    Sub(handler())
    for key, acked in (("a", 0), ("b", offsets[-1])):
        ConsumerOffset.objects.create(
            consumer_group="g", topic="t", partition_key=key, offset_acked=acked, offset_claimed=acked
        )
    found = seeking.preview(USING, G, Position(offsets[-3]), OperationLimits(counted=3, rows=1, seconds=60))
    assert (found.skipped, found.replayed) == (3, 1)


def for_another_group(every):
    """Addresses messages of the log to a group that is not g, as a redrive does; returns how many are left."""
    theirs = [offset for number, offset in enumerate(offsets_of()) if number % every]
    QueueMessage.objects.filter(offset__in=theirs).update(target_group="h")
    return QueueMessage.objects.filter(topic="t", target_group="").count()


@pytest.mark.parametrize("first", [2, 100])
def test_the_preview_leaves_out_messages_for_other_groups(db, first):
    limits = OperationLimits(read_first=first)
    log(40, "ab")
    mine = for_another_group(every=4)
    assert mine == 10
    end = seeking.position_of(USING, "latest")
    sub = Sub(handler())
    assert seeking.preview(USING, G, end, limits) == seeking.Preview(end, replayed=0, skipped=mine)
    sub.settle(rounds=100)
    assert seeking.preview(USING, G, Position(0), limits) == seeking.Preview(Position(0), replayed=mine, skipped=0)
    place = Position(offsets_of()[19])
    assert seeking.preview(USING, G, place, limits).replayed == mine - 5


@pytest.mark.parametrize("first", [2, 100])
def test_the_preview_reads_a_bounded_part_of_the_log_and_says_so(db, first):
    limits = OperationLimits(read_first=first, read=10)
    log(400, "ab")
    for_another_group(every=1000)
    Sub(handler())
    found = seeking.preview(USING, G, seeking.position_of(USING, "latest"), limits)
    assert (found.replayed, found.skipped, found.exact) == (0, 1, False)
    limits = OperationLimits(read_first=first, read=10, counted=1)
    assert seeking.preview(USING, G, found.position, limits).exact, "one or more is true"


def test_the_preview_reads_a_part_of_very_many_partitions_and_says_so(db):
    log(60, "abcdef")
    Sub(handler())
    end = seeking.position_of(USING, "latest")
    assert seeking.preview(USING, G, end, OperationLimits(rows=2, seconds=0)) == seeking.Preview(
        end, 0, 20, exact=False
    )
    assert seeking.preview(USING, G, end, OperationLimits(rows=2, seconds=60)) == seeking.Preview(end, 0, 60)


def test_the_preview_counts_in_partitions_with_something_to_count_only(db):
    offsets = log(60, "abcdef")
    Sub(handler())
    for key, acked in zip("abcdef", [*offsets[-6:-1], 0], strict=True):
        ConsumerOffset.objects.create(
            consumer_group="g", topic="t", partition_key=key, offset_acked=acked, offset_claimed=acked
        )
    with recorded() as recorder:
        found = seeking.preview(USING, G, seeking.position_of(USING, "latest"))
    assert (found.replayed, found.skipped) == (0, 10)
    (counted,) = [one.sql for one in recorder.sent if "COUNT(CASE" in one.sql]
    assert counted.count("COUNT(CASE") == 1


def test_the_preview_ends_when_both_counts_have_ended(db, monkeypatch):
    offsets = log(60, "abcdef")
    Sub(handler())
    for key in "abcdef":
        half = offsets[29]
        ConsumerOffset.objects.create(
            consumer_group="g", topic="t", partition_key=key, offset_acked=half if key > "a" else 0, offset_claimed=half
        )
    reads, read = [], partitions.last_offsets
    monkeypatch.setattr(partitions, "last_offsets", lambda *args, **options: reads.append(1) or read(*args, **options))
    found = seeking.preview(USING, G, Position(offsets[14]), OperationLimits(rows=1, counted=1, seconds=60))
    assert (found.replayed, found.skipped, found.exact) == (1, 1, True)
    assert len(reads) == 2, "the rest can change neither"
