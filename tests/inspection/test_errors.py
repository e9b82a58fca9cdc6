"""Errors by kind: what is counted, how far, and how the groups share the bound."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish, publish_many
from django_mysqlqueue.inspection import Bounds, Count, KeyShare, list_errors
from django_mysqlqueue.inspection.error_kinds import LOST_TEXT, deal, retrying_of_kind, whole_line
from django_mysqlqueue.models import DeliveryEvent, DeliveryState, QueueMessage
from django_mysqlqueue.operations import redriving
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.testing import _advance
from tests.support.dashboard import WAITS
from tests.support.handlers import both_modes
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.inspected import group_of
from tests.support.internals import DeadLetterFilter, GroupRef, Session, settling
from tests.support.scenarios import offsets_of

pytestmark = pytest.mark.usefixtures("db")

KIND = "ValueError: no <number>"


def fail(delivery):
    raise ValueError(f"no {delivery.payload}")


def failing(number, *, topic="t", group="g", **options):
    """Messages of which each attempt fails."""
    publish_many(topic, (Message(one, key="k") for one in range(number)))
    sequence()
    options = {"max_attempts": 9, "backoff": WAITS} | options
    sub = Sub(handler(topic, group, fail, **options))
    sub.settle()
    sequence()
    return sub


def counts(**given):
    return {
        (*one.ref, one.text): (str(one.retrying), str(one.dead_letters), str(one.attempts))
        for one in list_errors(**given).kinds
    }


def again():
    """All that waits is due."""
    DeliveryState.objects.filter(acked=False).update(invisible_until=1)


@both_modes
def test_retrying_is_what_the_overview_counts(mode):
    failing(3, mode=mode).leave()
    again()
    sub = Sub(handler(function=fail, mode=mode, max_attempts=9, backoff=WAITS))
    sub.step()
    sub.work(1)
    sub.flush()
    (kind,) = list_errors().kinds
    assert kind.retrying == group_of("g", "t").retrying
    # The others are in flight for their second attempt.
    assert str(kind.retrying) == "1"
    assert kind.states == ("retrying",)
    assert str(kind.attempts) == "4"


def test_all_attempts_of_a_message_that_was_dead_lettered_are_counted_once():
    failing(2, max_attempts=3, backoff=WAITS).leave()
    for _attempt in range(2):
        again()
        sub = Sub(handler(function=fail, max_attempts=3, backoff=WAITS))
        sub.settle()
        sub.leave()
    sequence()
    (kind,) = list_errors().kinds
    assert (kind.retrying, kind.dead_letters, kind.attempts) == (Count(0), Count(2), Count(6))
    assert kind.dead_letter == offsets_of("t_dlq")[-1]
    assert kind.offset == offsets_of("t")[-1]
    assert kind.error_class == "ValueError"
    assert 0 < kind.first_at <= kind.last_at <= list_errors().now


def test_a_redriven_message_fails_again_and_its_earlier_attempts_remain():
    failing(1, max_attempts=1).leave()
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor="test", limit=1)
    sequence()
    Sub(handler(function=fail, max_attempts=9, backoff=WAITS)).settle()
    assert counts() == {("g", "t", KIND): ("1", "0", "2")}


def test_dead_letters_of_a_dropped_group_are_listed():
    failing(2, max_attempts=1).leave()
    operations.drop_group("g", "t", actor="test")
    assert counts() == {("g", "t", KIND): ("0", "2", "2+")}


def test_a_group_and_a_topic():
    failing(1, max_attempts=1)
    failing(2, topic="u", group="h")
    assert counts(topic="u") == counts(group="h") == {("h", "u", KIND): ("2", "0", "2")}
    assert counts(topic="t_dlq") == counts(topic="t") == {("g", "t", KIND): ("0", "1", "1")}
    assert counts(topic="t", group="h") == {}
    failing(1, topic="u", group="i", max_attempts=1)
    Sub(handler("u_dlq", "reader", fail, max_attempts=9, backoff=WAITS)).settle()
    for topic in ("u", "u_dlq"):
        assert counts(topic=topic)["reader", "u_dlq", KIND] == ("3", "0", "3")


def test_groups_share_the_bound_and_leave_the_rest_to_others():
    failing(9, topic="many", group="b")
    failing(1, topic="few", group="a")
    for errors, read in ((10, "9"), (6, "5+"), (3, "2+"), (2, "1+")):
        found = list_errors(bounds=Bounds(errors=errors))
        by_group = {one.ref.group: one for one in found.kinds}
        assert str(by_group["b"].retrying) == read, errors
        assert by_group["a"].retrying == Count(1)
        assert found.whole is by_group["b"].is_exact is (errors == 10)


def test_dlq_topics_share_the_bounds():
    failing(9, topic="many", max_attempts=1)
    failing(2, topic="few", max_attempts=1)
    for bounds, read in ((Bounds(errors=8), "6+"), (Bounds(dead_letters=7), "5+"), (Bounds(errors=11), "9")):
        found = {one.ref.topic: one for one in list_errors(bounds=bounds).kinds}
        assert str(found["many"].dead_letters) == read
        assert str(found["few"].dead_letters) == "2"


def test_groups_above_the_bound_are_counted():
    for number in range(3):
        failing(1, topic=f"t{number}")
    found = list_errors(bounds=Bounds(groups=2))
    assert {one.ref.topic for one in found.kinds} == {"t0", "t1"}
    assert (found.more_groups, found.whole) == (1, False)


def test_shares():
    assert deal({"a": 1, "b": 9, "c": 9}, 9) == {"a": 1, "b": 4, "c": 4}
    assert deal({"a": 1, "b": 2}, 9) == {"a": 1, "b": 2}
    assert deal({}, 9) == {}


def test_messages_of_a_kind():
    failing(4)
    session, ref = Session(USING), GroupRef("g", "t")
    all_of_them = offsets_of()
    assert retrying_of_kind(session, ref, KIND, shown=whole_line) == (all_of_them, True)
    assert retrying_of_kind(session, ref, "another", shown=whole_line) == ([], True)
    some, whole = retrying_of_kind(session, ref, KIND, shown=whole_line, bounds=Bounds(errors=3))
    assert (len(some), whole) == (3, False)
    assert set(some) < set(all_of_them)


def test_failures_that_are_not_recorded(settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "none"}
    failing(2)
    found = list_errors()
    assert found.unrecorded == (("g", "t"),)
    assert counts() == {("g", "t", KIND): ("2", "0", "2+")}


def test_acks_are_no_errors(settings):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    publish_many("t", range(3))
    Sub(handler()).settle()
    found = list_errors()
    assert (found.kinds, found.whole) == ((), True)


def test_an_attempt_again_after_a_seek_with_another_error(settings):
    """It has the same number as the recorded one, and is another attempt."""
    failing(1).leave()
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "none"}
    operations.seek("g", "t", "earliest", actor="test")

    def fail_otherwise(delivery):
        raise KeyError("gone")

    Sub(handler(function=fail_otherwise, max_attempts=9, backoff=WAITS)).settle()
    assert counts() == {("g", "t", "KeyError: 'gone'"): ("1", "0", "1+"), ("g", "t", KIND): ("0", "0", "1+")}
    found = list_errors()
    assert all(0 < found.now - one.last_at < 60_000 for one in found.kinds)


@pytest.mark.parametrize("recorded", ["failures", "none"])
def test_a_message_that_an_operator_dead_letters_remains_of_its_kind(settings, recorded):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": recorded}
    failing(2)
    before = list_errors().kinds[0]
    operations.dead_letter("g", "t", offsets=offsets_of()[:1], actor="ada", reason="a test order " * 76)
    sequence()
    (kind,) = list_errors().kinds
    assert (kind.ref, kind.text, str(kind.retrying), str(kind.dead_letters)) == (("g", "t"), KIND, "1", "1")
    if recorded == "failures":
        assert kind.attempts == Count(2)
        assert (kind.first_at, kind.last_at) == (before.first_at, before.last_at)


def test_a_message_that_an_operator_dead_letters_before_any_failure_has_no_attempt():
    publish_many("t", [1])
    Sub(handler(function=lambda delivery: delivery.snooze(3600))).settle()
    operations.dead_letter("g", "t", offsets=offsets_of(), actor="ada", reason="a test order")
    sequence()
    (kind,) = list_errors().kinds
    assert (kind.text, str(kind.dead_letters), str(kind.attempts)) == ("<no text>", "1", "0")
    assert 0 < kind.first_at == kind.last_at
    assert kind.offset == offsets_of()[0]


@pytest.mark.parametrize("recorded", ["failures", "none"])
def test_an_expired_message_that_is_dead_lettered_has_no_further_attempt(settings, recorded):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": recorded}
    publish("t", 1, expires_in=3600)
    sequence()
    options = {"max_attempts": 9, "backoff": WAITS, "on_expiry": "dead_letter"}
    sub = Sub(handler(function=fail, **options))
    sub.settle()
    sub.leave()
    again()
    _advance(USING, 3_600_000)
    Sub(handler(function=fail, **options)).settle()
    sequence()
    found = {one.text.split(" at ")[0]: one for one in list_errors().kinds}
    expired = found.pop("The message expired")
    assert (str(expired.dead_letters), expired.attempts.value) == ("1", 0)
    assert 0 < expired.first_at == expired.last_at
    assert [(one.text, one.attempts.value) for one in found.values()] == [(KIND, 1)] * (recorded == "failures")


def test_attempts_are_a_lower_bound_if_their_records_are_kept_for_less_than_a_day(settings):
    failing(1)
    for seconds, attempts in ((3600, "1+"), (86_400, "1")):
        settings.MYSQLQUEUE = {"HISTORY_RETENTION": seconds}
        assert counts() == {("g", "t", KIND): ("1", "0", attempts)}


@pytest.mark.parametrize(("ago_minutes", "hour"), [(-1, 23), (1, 23), (61, 22), (23 * 60 + 59, 0), (24 * 60 + 1, None)])
def test_the_hour_of_an_attempt(ago_minutes, hour):
    """The database's clock may have been set back since."""
    failing(1)
    now = Session(USING).now()
    DeliveryEvent.objects.update(settled_at=now - ago_minutes * 60_000)
    (kind,) = list_errors().kinds
    assert [place for place, number in enumerate(kind.by_hour) if number] == ([] if hour is None else [hour])
    assert str(kind.attempts) == ("0" if hour is None else "1")


@both_modes
def test_a_message_that_is_snoozed_is_not_retrying(mode):
    publish_many("t", [1])
    Sub(handler(mode=mode, function=lambda delivery: delivery.snooze(3600))).settle()
    found = list_errors()
    assert (found.kinds, found.whole) == ((), True)
    assert retrying_of_kind(Session(USING), GroupRef("g", "t"), "", shown=whole_line) == ([], True)


def test_attempts_before_the_last_day_are_not_missing():
    failing(4)
    DeliveryEvent.objects.filter(message_offset__in=offsets_of()[:2]).update(settled_at=1)
    DeliveryState.objects.all().delete()
    assert [str(one.attempts) for one in list_errors(bounds=Bounds(errors=3)).kinds] == ["2"]
    assert [str(one.attempts) for one in list_errors(bounds=Bounds(errors=2)).kinds] == ["2+"]


def fails_with(error, **options):
    """A subscriber of which each attempt fails with an error."""

    def function(delivery):
        raise error

    sub = Sub(handler(function=function, **{"max_attempts": 9, "backoff": WAITS} | options))
    sub.settle()
    sub.leave()
    sequence()


def test_a_dead_letter_of_a_redriven_message_is_counted_once():
    failing(1, max_attempts=1).leave()
    redriving.redrive_all(USING, DeadLetterFilter("t_dlq"), actor="test", limit=1)
    sequence()
    fails_with(KeyError("other"), max_attempts=2, backoff=Backoff(initial=0, jitter=0))
    assert counts() == {("g", "t", KIND): ("0", "0", "1"), ("g", "t", "KeyError: 'other'"): ("0", "1", "2")}


@both_modes
def test_a_message_that_waits_after_a_loss_says_so(clock, mode):
    """No attempt at it has had an error. One that had keeps its text."""
    publish("t", 1)
    options = {"function": fail, "mode": mode, "max_attempts": 9, "backoff": WAITS}
    for _loss in range(2):
        sub = Sub(handler(**options)).step()
        held = sub.take()
        assert not held.claimed.suspect or settling.record_start(USING, held.claimed)
        clock.advance(61)
    Sub(handler(**options)).step().leave()
    assert counts() == {("g", "t", LOST_TEXT): ("1", "0", "1")}
    (offset,) = offsets_of()
    assert retrying_of_kind(Session(USING), GroupRef("g", "t"), LOST_TEXT, shown=whole_line) == ([offset], True)
    DeliveryState.objects.update(last_error="ValueError: no 1")
    assert counts() == {("g", "t", KIND): ("1", "0", "1")}


# -- by key --------------------------------------------------------------------------------


def failing_keys(numbers, **options):
    """As many messages of each key, of which each attempt fails; every second one has a priority."""
    publish_many(
        "t",
        (Message(number, key=key, priority=number % 2) for key, many in numbers.items() for number in range(many)),
    )
    sequence()
    sub = Sub(handler("t", "g", fail, **{"max_attempts": 9, "backoff": WAITS, "mode": "shared"} | options))
    sub.settle()
    sub.leave()
    sequence()


@pytest.mark.parametrize("options", [{}, {"TOPICS": {"t": {"PARTITIONS": 2}}}], ids=["own partitions", "hashed"])
def test_the_keys_of_a_kind(settings, options):
    settings.MYSQLQUEUE = options
    failing_keys({"a": 1, "b": 2, None: 1}, max_attempts=1)
    failing_keys({"b": 3, "c": 1})
    (kind,) = list_errors(by_key=True).kinds
    assert kind.keys == (
        KeyShare("b", 3, 2, 5),
        KeyShare(None, 0, 1, 1),
        KeyShare("a", 0, 1, 1),
        KeyShare("c", 1, 0, 1),
    )
    for name in ("retrying", "dead_letters", "attempts"):
        assert sum(getattr(one, name) for one in kind.keys) == getattr(kind, name).value
    assert kind.more_keys == 0
    assert list_errors().kinds[0].keys == ()


def test_the_ten_keys_with_most_failures():
    failing_keys({f"k{number:02}": 1 + (number == 7) for number in range(13)})
    (kind,) = list_errors(by_key=True).kinds
    assert [one.key for one in kind.keys] == ["k07", *(f"k{number:02}" for number in range(10) if number != 7)]
    assert kind.more_keys == 3


def test_attempts_of_a_key_are_those_of_a_day():
    failing_keys({"a": 2})
    DeliveryEvent.objects.filter(message_offset=offsets_of()[0]).update(settled_at=1)
    (kind,) = list_errors(by_key=True).kinds
    assert kind.keys == (KeyShare("a", 2, 0, 1),)
    assert kind.attempts.value == 1


def test_the_keys_of_a_kind_are_of_what_was_read():
    failing_keys({"a": 3, "b": 1})
    (kind,) = list_errors(by_key=True, bounds=Bounds(errors=2)).kinds
    assert str(kind.retrying) == "2+"
    assert sum(one.retrying for one in kind.keys) == 2


@pytest.mark.parametrize("options", [{}, {"TOPICS": {"t": {"PARTITIONS": 2}}}], ids=["own partitions", "hashed"])
def test_errors_of_a_key(settings, options):
    settings.MYSQLQUEUE = options
    failing_keys({"a": 1, "b": 2}, max_attempts=1)
    failing_keys({"b": 1, "c": 1})
    assert counts(key="b") == {("g", "t", KIND): ("1", "2", "3")}
    assert counts(key="c") == {("g", "t", KIND): ("1", "0", "1")}
    assert counts(key="d") == {}
    (kind,) = list_errors(key="a").kinds
    assert kind.offset == offsets_of()[0]
    assert kind.dead_letter in offsets_of("t_dlq")


def test_the_key_of_a_dead_letter_whose_message_is_gone(settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 2}}}
    failing_keys({"a": 2}, max_attempts=1)
    QueueMessage.objects.filter(topic="t").delete()
    assert list_errors(by_key=True).kinds[0].keys == (KeyShare("a", 0, 2, 2),)


def test_who_does_not_ask_for_keys_sends_no_further_statement(settings):
    settings.MYSQLQUEUE = {"TOPICS": {"t": {"PARTITIONS": 2}}}
    failing_keys({"a": 2}, max_attempts=1)
    sent = []
    for by_key in (False, True):
        with CaptureQueriesContext(connection) as captured:
            list_errors(by_key=by_key)
        sent.append(len(captured))
    assert sent[1] == sent[0] + 1
