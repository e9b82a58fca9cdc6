"""Retries at another time: what operators are told, and what is put on record."""

from __future__ import annotations

import datetime

import pytest
from django.utils import timezone

from django_mysqlqueue import Message, operations, publish_many, subscriber
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.models import DeliveryState, Operation
from tests.support.harness import Sub, handler

REF = ("g", "t")
LATER = datetime.datetime(2090, 1, 1, 12, tzinfo=datetime.UTC)
BLOCKS = 'The handler has on_failure="block": all later messages of their partitions wait, too.'
LOST_HOLDS = "Later messages of a partition wait for a message whose subscriber was lost."
MAY_BLOCK = 'If the handler has on_failure="block", all later messages of their partitions wait, too.'


@pytest.fixture
def waiting(db, no_handlers):
    """Two messages of a group wait for an hour; the mode can be chosen."""

    def make(mode="ordered"):
        publish_many("t", [Message(number, key="a", id=f"m{number}") for number in range(2)])
        Sub(handler(function=lambda delivery: delivery.nack(3600, f"no {delivery.payload}"), mode=mode)).settle()

    return make


def plan(**options):
    return operations.retry(*REF, actor="ada", dry_run=True, **{"at": LATER, **options})


def dues():
    return list(DeliveryState.objects.order_by("message_offset").values_list("invisible_until", flat=True))


@pytest.mark.parametrize(
    ("mode", "options", "expected"),
    [
        ("ordered", {"on_failure": "block"}, (BLOCKS,)),
        ("ordered", {"on_failure": "skip"}, (LOST_HOLDS,)),
        ("ordered", None, (MAY_BLOCK, LOST_HOLDS)),
        ("shared", {"mode": "shared"}, ()),
        ("shared", None, ()),
    ],
)
def test_the_preview_says_what_waits_behind_a_moved_retry(waiting, mode, options, expected):
    waiting(mode)
    if options is not None:
        subscriber("t", group="g", **options)(lambda delivery: None)
    assert plan().warnings == expected
    assert plan(at=None).warnings == ()


def test_two_handlers_of_a_group_do_not_prevent_a_move(waiting):
    waiting()

    def first(delivery): ...

    def second(delivery): ...

    for function in (first, second):
        subscriber("t", group="g", on_failure="block")(function)
    assert plan().warnings == (MAY_BLOCK, LOST_HOLDS)


def test_all_are_moved_and_the_time_is_on_record(waiting):
    waiting()
    found = operations.retry(*REF, at=LATER, reset_attempts=True, actor="ada", reason="the bank is closed")
    assert found.summary == ("Messages of the group g/t that will be retried at 2090-01-01 12:00:00+0000: 2.",)
    assert set(dues()) == {int(LATER.timestamp() * 1000)}
    record = Operation.objects.get()
    assert (record.action, record.changed, record.reason) == ("retry", 2, "the bank is closed")
    assert record.detail == "at 2090-01-01T12:00:00.000+00:00, attempts counted from 1 again"


def test_a_naive_time_is_in_the_time_zone_of_the_project(waiting):
    waiting()
    operations.retry(*REF, at=datetime.datetime(2090, 1, 1, 12), actor="ada")  # noqa: DTZ001
    assert set(dues()) == {int(timezone.make_aware(datetime.datetime(2090, 1, 1, 12)).timestamp() * 1000)}  # noqa: DTZ001


def test_a_time_in_the_past_is_now(waiting):
    waiting()
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    planned, note, attempts = plan(at=past).summary
    assert planned == "Messages of the group g/t that will be retried now: 2."
    assert note == "This time is in the past: the messages will be retried now."
    assert attempts == "Each retry uses up an attempt."
    assert operations.retry(*REF, at=past, actor="ada").changed == 2
    assert dues() == [0, 0]


def test_an_error_and_ids_choose_together(waiting):
    waiting()
    before = dues()
    assert plan(ids=["m0", "m1"], error="no 1").planned == 1
    assert operations.retry(*REF, ids=["m0", "m1"], error="no 1", at=LATER, actor="ada").changed == 1
    assert dues() == [before[0], int(LATER.timestamp() * 1000)]
    found = operations.retry(*REF, ids=["m0"], error="no 1", at=LATER, actor="ada")
    assert found.summary == ("No messages of the group g/t with an error that contains “no 1” are waiting.",)


def test_moving_again_to_the_same_time_changes_nothing_and_is_no_error(waiting):
    waiting()
    for changed in (1, 0):
        assert operations.retry(*REF, ids=["m0"], at=LATER, actor="ada").changed == changed
    found = operations.retry(*REF, ids=["m0"], at=LATER, actor="ada")
    assert found.summary == (
        "No messages of the group g/t are waiting for an attempt at another time than 2090-01-01 12:00:00+0000.",
    )


def test_what_a_subscriber_holds_is_refused_by_name(db):
    publish_many("t", [Message(0, key="a", id="held")])
    Sub(handler()).step()
    with pytest.raises(OperationRefused, match="are not waiting for another attempt in the group g/t: 'held'"):
        plan(ids=["held"])


def test_a_time_after_the_year_9999_is_refused(db):
    Sub(handler())
    west = datetime.timezone(datetime.timedelta(hours=-12))
    with pytest.raises(OperationRefused, match=r"at datetime.* must be before the year 10000 in UTC"):
        plan(at=datetime.datetime(9999, 12, 31, 23, tzinfo=west))
