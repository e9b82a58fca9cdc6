"""What became of a message, and of what was made of it."""

from __future__ import annotations

import pytest

from django_mysqlqueue import publish
from django_mysqlqueue.admin.pages.base import Page
from django_mysqlqueue.inspection.bounds import Bounds
from django_mysqlqueue.models import DeliveryEvent, QueueMessage
from django_mysqlqueue.operations import dropping, redriving
from tests.support.dashboard import life, page
from tests.support.handlers import fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import Action, DeadLetterFilter, Settlement
from tests.support.scenarios import G, dead_letters, log, offsets_of

pytestmark = pytest.mark.any_engine

ALL = {"RECORD_DELIVERIES": "all"}


def test_from_the_original_to_the_dead_letter_to_where_it_went_and_back(client):
    (letter,) = dead_letters(1, keys="a")
    (first,) = offsets_of()
    text = page(client, "message", offset=first)
    assert "Open dead letter" in text
    assert f"offset={letter}" in text
    text = page(client, "message", offset=letter)
    assert f"This is a dead letter: g dead-lettered message {first} of t." in text
    assert f'message/?offset={first}"' in text
    assert "ValueError: no 0" in text
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq", offsets=(letter,)), actor="ada")
    text = page(client, "message", offset=letter)
    assert "no longer in the log" in text
    assert "ada redrove it for g." in text
    assert "The new message is not in the log" in text
    assert "The dead letter is not in the log" in page(client, "message", offset=first)
    sequence()
    (_, again) = offsets_of()
    assert f'message/?offset={again}"' in page(client, "message", offset=letter)
    text = page(client, "message", offset=first)
    assert f"ada redrove it as message {again}." in text
    text = page(client, "message", offset=again)
    assert f"This message was redriven. The original is message {first} of t." in text
    assert "Only the group g receives this message." in text


def test_edited_ones_name_the_original_and_the_other_way_round(client):
    (letter,) = dead_letters(1, keys="a")
    (first,) = offsets_of()
    redriving.replace(USING, "t_dlq", letter, {"fixed": True}, actor="ada")
    sequence()
    (_, new) = offsets_of()
    assert f"ada edited and redrove it as message {new}." in page(client, "message", offset=first)
    assert "ada edited and redrove it for g." in page(client, "message", offset=letter)
    text = page(client, "message", offset=new)
    assert "An operator published this message to replace message" in text
    assert f'message/?offset={first}"' in text
    QueueMessage.objects.filter(offset=first).delete()
    assert "which is no longer in the log." in page(client, "message", offset=new)


def test_a_discarded_dead_letter_says_who_and_why(client):
    (letter,) = dead_letters(1, keys="a")
    redriving.discard_all(USING, DeadLetterFilter("t_dlq", offsets=(letter,)), actor="ada", reason="a test order")
    assert "ada discarded it: a test order" in page(client, "message", offset=letter)


def test_a_second_failure_does_not_name_the_first_one_as_its_successor(client):
    (letter,) = dead_letters(1, keys="a")
    for number in range(2):
        redriving.redrive_all(USING, DeadLetterFilter("t_dlq", offsets=(letter,)), actor=f"operator-{number}")
        sequence()
        sub = Sub(handler(function=fail, max_attempts=1))
        sub.settle()
        sub.leave()
        sequence()
        (letter,) = offsets_of("t_dlq")
    first, second, third = offsets_of()
    text = page(client, "message", offset=first)
    assert f"operator-0 redrove it as message {second}." in text
    assert f"operator-1 redrove it as message {third}." in text
    text = page(client, "message", offset=second)
    assert "operator-0" not in text
    assert f"operator-1 redrove it as message {third}." in text
    assert "redrove it" not in page(client, "message", offset=third)


def test_a_message_that_is_gone_is_told_from_its_records(client, settings):
    settings.MYSQLQUEUE = ALL
    sub = Sub(handler())
    (offset,) = log(1, "a")
    sub.settle()
    QueueMessage.objects.all().delete()
    text = page(client, "message", offset=offset)
    assert "no longer in the log" in text
    tag, told, _ = life(client, offset)
    assert tag == "acked"
    assert told[0] == f"Attempt 1: claimed by {sub.name}."
    DeliveryEvent.objects.all().delete()
    assert f"There is no message at offset {offset}" in page(client, "message", 404, offset=offset)


def test_a_dropped_groups_records_stay(client, settings):
    settings.MYSQLQUEUE = ALL
    sub = Sub(handler())
    (offset,) = log(1, "a")
    sub.settle()
    sub.leave()
    dropping.drop(USING, G, actor="ada")
    assert life(client, offset)[0] == "acked"


def test_no_more_records_than_a_page_holds(client, settings, monkeypatch):
    settings.MYSQLQUEUE = ALL
    monkeypatch.setattr(Page, "bounds", Bounds(recorded=3))
    sub = Sub(handler(function=fail, max_attempts=9))
    (offset,) = log(1, "a")
    sub.settle()
    text = page(client, "message", offset=offset)
    assert "Only the newest 3 records are shown." in text
    assert "Attempt 9" in text
    assert "Attempt 6 failed" not in text


@pytest.mark.parametrize(
    ("offset", "status", "says"),
    [
        ("0", 400, "must be an integer of at least 1"),
        ("x", 400, "must be an integer"),
        ("99999999", 404, "There is no message at"),
    ],
)
def test_an_offset_that_is_none(client, offset, status, says):
    assert says in page(client, "message", status, offset=offset)


def test_without_an_offset_it_asks_for_one(client):
    assert 'name="offset"' in page(client, "message")


def test_a_message_that_was_deleted_before_it_was_handled(client):
    publish("t", 1, key="k")
    sequence()
    sub = Sub(handler())
    sub.step()
    held = sub.take()
    sub.inbox.settle(Settlement(held.claimed, Action.DELETED), ordered=True)
    sub.flush()
    (offset,) = offsets_of("t")
    QueueMessage.objects.all().delete()
    tag, steps, _ = life(client, offset)
    assert tag == "deleted"
    assert f"Deleted from the log before it was handled; {sub.name} settled it without calling the handler." in steps
    assert f"Claimed by {sub.name}." in steps
