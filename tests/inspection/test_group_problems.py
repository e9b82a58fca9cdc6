"""What makes a problem of a group, how severe it is, and since when: each bound, without a database."""

from __future__ import annotations

import dataclasses

import pytest

from django_mysqlqueue.inspection import beginnings, group_problems
from django_mysqlqueue.inspection.beginnings import Began, Ended, Failed, Past, Rule, Run
from django_mysqlqueue.inspection.bounds import StallTimes
from django_mysqlqueue.inspection.group_problems import Attempts
from django_mysqlqueue.inspection.limited import Limited
from django_mysqlqueue.inspection.outbox import DueMessages
from django_mysqlqueue.inspection.overview import GroupOverview
from django_mysqlqueue.inspection.partitions import HeadMessage
from django_mysqlqueue.inspection.subscribers import SubscriberStatus
from django_mysqlqueue.models import ConsumerGroup
from django_mysqlqueue.options.delivery_limits import DeliveryLimits, parse_rate
from django_mysqlqueue.text.humanize import clock_text
from tests.support.harness import handler
from tests.support.internals import Bucket, Count, GroupRef, HealthSettings, OptionColumns, Subset

G = GroupRef("g", "t")
NOW = 10_000_000
TIMES = StallTimes(stuck=60, still=600, started=30)


def ago(seconds):
    return NOW - seconds * 1000


def head(waits=0, *, key="k", attempts=0, by="", until=0):
    return HeadMessage(key, 7, ago(waits), bool(attempts), attempts, by, until, "Traceback\nValueError: no")


def live(since=3600, *, subset=None, is_live=True):
    info = {"started_at": ago(since), **({"subset": subset.as_json()} if subset else {})}
    return SubscriberStatus(G, "s", NOW, 0, info, is_live)


def group(*heads, lag=None, subscribers=(), **values):
    values = {
        "mode": "ordered",
        "paused": False,
        "after_seek": "",
        "start_offset": 0,
        "registered_at": 1,
        "sought_at": 0,
        "overrides": (),
        "filter": None,
        "option_columns": OptionColumns(),
        "limited": None,
        "lag_by_priority": {},
        "waiting": None,
        "in_flight": Count(0),
        "retrying": Count(0),
        "dead_letters": Count(0),
        "recent_dead_letters": Count(0),
        "head_backlogs": {},
        "partitions": (),
        "more_partitions": False,
        **values,
    }
    lag = Count(len(heads) if lag is None else lag)
    return GroupOverview(ref=G, lag=lag, heads=heads, subscribers=tuple(subscribers), **values)


def found(one, *, code=None, moves=False, **values):
    """Kind, severity, seconds since when and number of messages of each problem."""
    problems = group_problems.progress(one, code, NOW, TIMES, moves=moves, **values)
    return [
        (p.kind, p.severity, None if p.since is None else (NOW - p.since) / 1000, p.messages.value) for p in problems
    ]


def only(one, **values):
    """The only problem of a group."""
    (problem,) = group_problems.progress(one, None, NOW, TIMES, moves=False, **values)
    return problem


def test_messages_without_subscribers_are_a_problem_after_a_while():
    began = Began(served_until=ago(20))
    assert found(group(), began=began) == []
    assert found(group(head(59), head(5), lag=9), began=began) == [("no_subscriber", 2, 20, 9)]
    assert found(group(head(60)), began=began) == [("no_subscriber", 0, 20, 1)]
    assert found(group(head(60), subscribers=[live(is_live=False)])) == [("no_subscriber", 0, None, 1)]
    assert found(group(waiting=DueMessages(Count(3), ago(70)))) == [("no_subscriber", 0, None, 3)]
    assert only(group(head(60))).oldest_at == ago(60)


def test_only_a_group_that_never_had_subscribers_may_be_dropped():
    never, once = only(group(head(60))), only(group(head(60)), began=Began(had_subscribers=True))
    assert "drop the group" in never.advice
    assert never.text.endswith("the oldest for 1 min. GC keeps all messages for the group.")
    assert once.text.endswith("the oldest for 1 min.")
    assert not once.advice


def test_a_paused_group_is_one_if_it_has_messages():
    began = Began(paused_at=ago(20))
    assert found(group(paused=True, subscribers=[live()]), began=began) == [("paused", 2, 20, 0)]
    paused = group(head(900), paused=True, subscribers=[live()])
    assert found(paused, began=began) == [("paused", 1, 20, 1)]
    assert (only(paused).since, only(paused).oldest_at) == (None, ago(900))


@pytest.mark.parametrize(
    ("after_seek", "expected"),
    [
        (ConsumerGroup.AfterSeek.DROPPED, ("drop_ended_early", 0, 900, 1)),
        (ConsumerGroup.AfterSeek.MOVES, ("moves", 2, 900, 1)),
        (ConsumerGroup.AfterSeek.STAY, ("seek_ended_early", 0, 900, 1)),
    ],
)
def test_an_unfinished_operation_is_the_only_problem_of_a_group(after_seek, expected):
    assert found(group(head(900), after_seek=after_seek, paused=True, subscribers=[live()])) == [expected]


@pytest.mark.parametrize(
    ("values", "severity"),
    [({}, 0), ({"paused": True}, 2), ({"after_seek": "resume"}, 2)],
)
def test_a_filter_that_cannot_be_parsed_is_urgent_if_the_group_would_claim(values, severity):
    one = group(head(60), filter="unknown", subscribers=[live()], **values)
    assert found(one)[0] == ("filter", severity, 60, 1)
    assert found(dataclasses.replace(one, heads=(head(59),)))[0][1] == 2
    assert "still" not in [kind for kind, *_ in found(dataclasses.replace(one, heads=(head(900),)))]


def test_another_mode_than_that_of_the_code():
    code = handler("t", "g", mode="shared")
    assert ("mode", 1, 5, 1) in found(group(head(5), subscribers=[live()]), code=code)
    assert ("mode", 0, 5, 1) in found(group(head(5)), code=code)
    assert ("mode", 1, None, 0) in found(group(), code=code)
    assert found(group(mode="shared"), code=code) == []


def test_a_message_that_has_failed_is_stuck_after_a_while():
    began = {"failed_first": {Failed(G, 7): ago(50), Failed(G, 8): ago(55)}}
    assert found(group(head(59, attempts=1), subscribers=[live()]), **began) == []
    assert found(group(head(60), subscribers=[live()]), **began) == []
    failed = group(head(60, attempts=1), lag=9, subscribers=[live()], head_backlogs={"k": 5})
    assert found(failed, **began) == [("stuck", 1, 50, 1)], "it is not known whether others wait for it"
    assert found(failed, code=handler("t", "g", on_failure="block")) == [("stuck", 1, None, 5)]
    assert found(failed, code=handler("t", "g", on_failure="skip"), **began) == [("stuck", 2, 50, 1)]
    assert (only(failed).oldest_at, only(failed).advice) == (ago(60), "")
    (problem,) = group_problems.progress(failed, None, NOW, TIMES, moves=False)
    assert (problem.key, problem.offset, problem.error) == ("k", 7, "ValueError: no")
    assert problem.text == "Message 7 of g/t has failed once and has waited for 1 min."
    of_dlq = dataclasses.replace(failed, ref=GroupRef("g", "t_dlq"))
    (problem,) = group_problems.progress(of_dlq, handler("t_dlq", "g", on_failure="block"), NOW, TIMES, moves=False)
    assert problem.text.startswith("Partition 'k' of g/t_dlq waits for message 7, which has failed once.")
    assert problem.advice.endswith("a DLQ topic has no DLQ.")


def test_a_message_whose_subscriber_was_lost_has_not_failed():
    def lost(by="", mode="ordered"):
        one = dataclasses.replace(head(60, attempts=1, by=by), last_error="")
        return only(group(one, subscribers=[live()], mode=mode))

    text = "Partition 'k' of g/t waits for message 7, whose subscriber was lost. It has waited for 1 min."
    assert lost().text == text
    in_shared_mode = "The subscriber of message 7 of g/t was lost. The message has waited for 1 min."
    assert (lost(mode="shared").text, lost(mode="shared").severity) == (in_shared_mode, 2)
    assert (lost().severity, lost("gone").severity, lost("s").severity) == (1, 1, 2)
    assert "log of the lost subscriber" in lost("gone").advice
    assert lost("s").advice == "Wait until the attempt in flight has ended."


def test_a_partition_that_no_subset_contains():
    subset = Subset(("other",))
    unserved = group(head(60), lag=9, subscribers=[live(30, subset=subset)], head_backlogs={"k": 5})
    assert found(unserved) == [("unserved", 0, 60, 5)]
    assert found(dataclasses.replace(unserved, heads=(head(59),))) == []
    assert found(dataclasses.replace(unserved, heads=(head(60, key="other"),))) == []
    assert found(dataclasses.replace(unserved, subscribers=(live(29, subset=subset),))) == []
    assert found(dataclasses.replace(unserved, subscribers=(live(30, subset=subset), live(1)))) == []
    mine = live(30, subset=Subset(("k",)))
    assert found(dataclasses.replace(unserved, subscribers=(live(30, subset=subset), mine))) == []


@pytest.mark.parametrize(
    ("first", "is_still"),
    [
        (head(600), True),
        (head(599), False),
        (head(600, by="s", until=NOW + 1), True),
        (head(600, until=NOW), True),
        (head(600, until=NOW + 1), False),
    ],
)
def test_a_group_whose_deliveries_do_not_end_is_stalled(first, is_still):
    one = group(head(1, key="young"), first, lag=9, subscribers=[live(600)])
    assert found(one) == [("still", 1, 600, 9)] * is_still
    assert found(one, moves=True) == []
    assert found(dataclasses.replace(one, subscribers=(live(599),))) == []
    by_rate = found(dataclasses.replace(one, limited=Limited(True, 0, True, by_rate=True)))
    assert [kind for kind, *_ in by_rate] == ["limited"]
    failed = dataclasses.replace(one, heads=(head(600, attempts=1),))
    assert [kind for kind, *_ in found(failed)] == ["stuck"], "it is explained"
    kinds = [kind for kind, *_ in found(dataclasses.replace(one, limited=Limited(True, 0, True, by_rate=False)))]
    assert kinds == ["limited", "still"][: 1 + is_still], "messages in flight may hang, a rate does not"


@pytest.mark.parametrize(
    ("limited", "says"),
    [
        (Limited(True, 3, True, by_rate=True), "limited to 5/s; 9 messages"),
        (Limited(False, 1, True, by_rate=True), "; 1 key is at its limit; 9 messages"),
        (Limited(False, 3, True, by_rate=True), "; 3 keys are at their limit; 9 messages"),
        (Limited(False, 3, False, by_rate=True), "; 3+ keys are at their limit; 9 messages"),
    ],
)
def test_limits_that_are_reached_are_for_information(monkeypatch, limited, says):
    monkeypatch.setattr(GroupOverview, "limits", DeliveryLimits(rate=parse_rate("5/s")))
    one = group(head(5), lag=9, subscribers=[live()], limited=limited)
    assert found(one) == [("limited", 2, None, 9)]
    assert only(one).oldest_at == ago(5)
    (problem,) = group_problems.progress(one, None, NOW, TIMES, moves=False)
    assert says in problem.text
    assert found(dataclasses.replace(one, heads=(), lag=Count(0))) == []


# -- failures -----------------------------------------------------------------


def minute(number, acked, failed, dead=0):
    """The counts of a minute that ended ``number`` minutes ago."""
    return Bucket(G, ago(60 * number), acked, failed, dead, 0, 0, 0, (), None, 0, 0, 0)


def ended(*numbers):
    """Of minutes, the last one first, the numbers of acked, failed and dead-lettered ones."""
    return Ended([minute(number, *one) for number, one in list(enumerate(numbers))[::-1]])


def failing(numbers, *, uptime=3600, thresholds=None, past=None, explained=0, code=None, heads=(), **values):
    thresholds = thresholds or HealthSettings(max_failure_ratio=0.5, min_attempts=4)
    one = group(*heads, subscribers=[live(uptime)], **{"retrying": Count(4), **values})
    attempts = Attempts(ended(*numbers), thresholds, 600, past, explained)
    problems = group_problems.failures(one, code, attempts, TIMES, NOW)
    return [(p.kind, p.severity, None if p.since is None else (NOW - p.since) / 1000) for p in problems]


def test_failures_are_a_problem_beyond_a_share_of_enough_newest_attempts():
    assert failing([(0, 0, 0)]) == []
    assert failing([(5, 0, 0), (5, 0, 0)]) == []
    assert failing([(0, 3, 0)]) == [("failing", 1, None)]
    assert failing([(0, 4, 0)]) == [("failing", 0, None)]
    assert failing([(2, 2, 0)]) == []
    assert failing([(1, 2, 0)]) == [], "too few attempts"
    assert failing([(1, 3, 0), (0, 2, 0), (100, 2, 0)]) == [("failing", 0, 60)]
    assert failing([(0, 2, 0), (2, 0, 0), (0, 50, 0)]) == [], "half of the newest"
    assert failing([(0, 3, 0), (2, 0, 0), (0, 50, 0)]) == [("failing", 0, 0)]
    assert failing([(3, 0, 0), (0, 50, 0), (9, 0, 0)]) == []
    assert failing([(1, 0, 0), (0, 50, 0), (9, 0, 0)]) == [("failing", 0, 60)]
    assert failing([(0, 4, 0)], uptime=29) == [], "its subscribers have just started"
    assert failing([(0, 0, 0), (0, 0, 0), (0, 4, 0)], uptime=30) == [], "those were other processes"
    assert failing([(0, 4, 0)], uptime=30) == [("failing", 0, None)]


def test_few_messages_that_are_tried_again_and_again_are_no_outage():
    mixed = [(0, 9, 0), (500, 0, 0)]
    assert failing([(500, 0, 0)], retrying=Count(3)) == []
    assert failing(mixed) == [("failing", 0, 0)]
    assert failing(mixed, retrying=Count(3)) == []
    assert failing(mixed, retrying=Count(3), recent_dead_letters=Count(1)) == [("failing", 0, 0)]
    assert failing(mixed, retrying=Count(9), explained=5) == [("failing", 0, 0)]
    assert failing(mixed, retrying=Count(9), explained=6) == [], "their key fails"
    assert failing([(0, 9, 0), (2, 0, 0)], retrying=Count(3)) == [("failing", 0, 0)], "more than have succeeded"
    assert failing([(0, 9, 0), (3, 0, 0)], retrying=Count(3)) == []
    assert failing([(0, 9, 0)], retrying=Count(2)) == [("failing", 0, None)], "nothing has succeeded"


def test_one_message_that_is_tried_again_and_again_is_no_outage():
    """Even if nothing has succeeded. The problem ``stuck`` is about it."""
    again, blocks = [(0, 9, 0)], handler("t", "g", on_failure="block")
    first = {"heads": [head(50, attempts=9)], "head_backlogs": {"k": 2}, "lag": 2}
    assert failing(again, retrying=Count(1)) == [("failing", 1, None)]
    assert failing(again, retrying=Count(1), **first) == [("failing", 1, None)]
    assert failing(again, retrying=Count(1), code=handler("t", "g", on_failure="skip"), **first) == [
        ("failing", 1, None)
    ]
    assert failing(again, retrying=Count(1), code=blocks, **first) == [("failing", 0, None)], "another one waits for it"
    assert failing(again, retrying=Count(1), code=blocks, **{**first, "head_backlogs": {"k": 1}}) == [
        ("failing", 1, None)
    ]
    held = [head(50, attempts=9, by="s"), head(50, key="fresh", by="s")]
    assert failing(again, retrying=Count(0), in_flight=Count(2), heads=held) == [("failing", 1, None)]
    assert failing(again, retrying=Count(1), in_flight=Count(1), heads=held) == [("failing", 0, None)]


def test_messages_that_wait_for_failing_ones_are_harmed():
    """Each key of an ordered group has one message that fails; the others of the key wait for it."""
    mixed, blocks = [(0, 9, 0), (50, 0, 0)], handler("t", "g", on_failure="block")
    first = {"heads": [head(50, key=key, attempts=2) for key in "abc"], "lag": 4}
    four, three = {"a": 2, "b": 1, "c": 1}, dict.fromkeys("abc", 1)
    assert failing(mixed, retrying=Count(3), head_backlogs=four, **first) == []
    assert failing(mixed, retrying=Count(3), head_backlogs=four, code=blocks, **first) == [("failing", 0, 0)]
    assert failing(mixed, retrying=Count(3), head_backlogs=three, code=blocks, **first) == []


def test_the_numbers_are_those_since_the_failures_began():
    one = group(subscribers=[live()], retrying=Count(5))
    thresholds = HealthSettings(max_failure_ratio=0.5, min_attempts=4, max_recent_dead_letters=None)

    def text(*numbers):
        (problem,) = group_problems.failures(one, None, Attempts(ended(*numbers), thresholds, 600), TIMES, NOW)
        return problem.text

    assert text((1, 3, 0), (1, 9, 0), (100, 0, 0)) == (
        f"g/t: 12 of 14 attempts have failed since {clock_text(ago(60), NOW)} (limit 50%)."
    )
    assert text((0, 3, 0), (0, 9, 0)) == "g/t: every attempt has failed in the last 10 min (12 of 12)."


def test_nothing_that_has_failed_is_left():
    nothing = {"retrying": Count(0)}
    assert failing([(0, 40, 0)], **nothing) == []
    assert failing([(0, 40, 0)], **nothing, in_flight=Count(1)) == [("failing", 1, None)]
    assert failing([(0, 40, 0)], **nothing, recent_dead_letters=Count(1)) == [("failing", 1, None)]
    assert failing([(0, 40, 0)], **nothing, recent_dead_letters=Count(2)) == [("failing", 0, None)]
    assert failing([(0, 40, 0)], **nothing, recent_dead_letters=Count(0, exact=False)) == [("failing", 0, None)]


def test_failures_have_begun_before_the_window_and_are_over_if_nothing_is_left():
    def problem(*heads, seconds=7200, **values):
        one = group(*heads, subscribers=[live()], retrying=Count(1), **values)
        past = seconds and Past([minute(1, 0, 4)], ago(seconds), None)
        thresholds = HealthSettings(max_recent_dead_letters=None)
        attempts = Attempts(ended((0, 4, 4)), thresholds, 600, past or None)
        (found,) = group_problems.failures(one, None, attempts, TIMES, NOW)
        return found

    assert (problem().since, problem(seconds=None).since) == (ago(7200), None)
    assert problem().advice == "Fix the cause, then redrive the dead letters."
    assert not problem(head(5)).advice
    assert problem(head(5), paused=True).advice == "Fix the cause, then resume the group."


def test_a_group_of_which_some_attempts_succeed_is_not_to_be_paused():
    def problem(*numbers):
        one = group(head(5), subscribers=[live()], retrying=Count(20))
        thresholds = HealthSettings(max_recent_dead_letters=None)
        (found,) = group_problems.failures(one, None, Attempts(ended(*numbers), thresholds, 600), TIMES, NOW)
        return found

    assert problem((4, 20, 0), (0, 9, 0)).advice.startswith("Find out what fails, and fix it.")
    assert not problem((0, 20, 0), (4, 9, 0), (9, 0, 0)).advice, "of the minute in which failures began"
    assert not problem((0, 20, 0), (0, 9, 0)).advice


def test_successes_of_before_the_window_are_among_the_newest_attempts():
    assert failing([(0, 3, 0)], past=Past([minute(11, 90, 0), minute(0, 0, 3)], None, None)) == []
    few = Past([minute(9, 1, 0), minute(0, 0, 3)], ago(0), None)
    assert failing([(0, 3, 0)], past=few) == [], "no longer than the window before the newest failure"
    few = Past([minute(10, 1, 0), minute(0, 0, 3)], ago(0), None)
    assert failing([(0, 3, 0)], past=few) == [("failing", 1, 0)]


def test_a_poison_message_has_no_failure_and_counts_as_one():
    assert failing([(0, 0, 4)]) == [("failing", 0, None)]
    assert failing([(0, 4, 4)]) == [("failing", 0, None)]
    assert (ended((0, 2, 3)).failed, ended((0, 3, 2)).failed, ended((1, 3, 2)).attempts) == (3, 3, 4)


def test_the_beginning_of_failures_by_minute():
    rule = Rule(0.5, 4)
    assert beginnings.continuing(ended((1, 1, 0), (0, 0, 1), (9, 0, 0)).buckets, rule) is None
    assert beginnings.continuing(ended((1, 2, 0), (0, 0, 1), (9, 0, 0)).buckets, rule) == Run(ago(60), False)
    assert beginnings.continuing(ended((1, 2, 0), (0, 0, 1)).buckets, rule) == Run(ago(60), True)
    assert beginnings.continuing(ended((0, 1, 0), (0, 0, 0), (0, 3, 0), (0, 0, 0), (9, 0, 0)).buckets, rule) == Run(
        ago(120), False
    )
    assert beginnings.continuing([], rule) is None


def test_the_beginning_of_failures_by_hour():
    def began(*hours, minute=1):
        buckets = [Bucket(G, at * 3_600_000, *one, 0, 0, 0, (), None, 0, 0, 0) for at, *one in hours]
        return beginnings.began_by_hour(buckets, Rule(0.5, 4), 10 * 3_600_000 + minute * 60_000) / 3_600_000

    minutes = 10 + 1 / 60
    assert began() == minutes
    assert began((9, 5, 0, 0), (10, 0, 0, 0)) == minutes
    assert began((9, 5, 0, 0), (10, 9, 1, 0)) == 10, "after successes of this hour"
    assert began((8, 9, 0, 0), (9, 0, 7, 7), (10, 0, 9, 0)) == 9
    assert began((7, 9, 1, 0), (9, 0, 7, 7), (10, 0, 9, 0)) == 9
    assert began((8, 9, 1, 0), (9, 0, 7, 7), (10, 0, 9, 0)) == 8
    assert began((2, 0, 7, 7)) == 2
    assert began((9, 9, 1, 0), minute=40) == 9, "the minutes of that hour are not known"


def test_the_beginning_of_too_many_dead_letters():
    def burst(*numbers):
        at = beginnings.burst(ended(*((9, 0, one) for one in numbers)).buckets, 10, 180_000)
        return None if at is None else (NOW - at) // 60_000

    assert burst(0, 0) is None
    assert burst(11, 0) == 0
    assert burst(5, 5) is None
    assert burst(5, 6, 0) == 1
    assert burst(0, 0, 5, 6, 0) == 3
    assert burst(3, 3, 3, 3, 3, 3, 3, 3) == 7, "ever since"
    assert burst(11, 0, 0, 0, 0, 20) == 0, "they were over"


@pytest.mark.parametrize(
    ("numbers", "values", "offered"),
    [
        ([], {}, True),
        ([(0, 1, 1), (9, 0, 0)], {}, False),
        ([(1, 2, 2)], {}, False),
        ([(2, 2, 2)], {}, True),
        ([(0, 0, 0), (0, 2, 2), (9, 0, 0)], {}, False),
        ([(0, 0, 0), (9, 2, 2)], {}, True),
        ([(0, 0, 0), (0, 0, 0), (0, 2, 2)], {"uptime": 30}, True),
        ([(9, 1, 1)], {"thresholds": HealthSettings(max_failure_ratio=None)}, True),
        ([(0, 1, 1)], {"thresholds": HealthSettings(max_failure_ratio=None)}, False),
    ],
)
def test_a_redrive_is_offered_unless_most_of_the_newest_attempts_fail(numbers, values, offered):
    """Even if there are too few of them for an outage, and not for those of processes that have ended."""
    subscribers = [live(values.get("uptime", 3600))]
    one = group(subscribers=subscribers, recent_dead_letters=Count(11), dead_letters=Count(11))
    attempts = Attempts(ended(*numbers), values.get("thresholds", HealthSettings()), 600)
    problems = group_problems.failures(one, None, attempts, TIMES, NOW)
    advice = [p.advice for p in problems if p.kind in ("recent_dead_letters", "dead_letters")]
    assert [text.startswith("Fix the cause first") for text in advice] == [not offered] * 2


def test_thresholds_can_be_turned_off():
    def off(**values):
        return HealthSettings(**{"max_failure_ratio": 0.5, "min_attempts": 4, **values})

    assert failing([(0, 9, 0)], thresholds=off(max_failure_ratio=None)) == [("failing", 1, None)]
    assert failing([(0, 9, 0)], thresholds=off(max_failure_ratio=1)) == [("failing", 1, None)]
    assert failing([(1, 9, 0)], thresholds=off(max_failure_ratio=None)) == []
    many = {"recent_dead_letters": Count(11), "dead_letters": Count(11)}
    assert failing([], **many) == [("recent_dead_letters", 0, None), ("dead_letters", 1, None)]
    assert failing([], thresholds=off(max_recent_dead_letters=None), **many) == [("dead_letters", 1, None)]


@pytest.mark.parametrize(
    ("recent", "counted", "expected"),
    [
        (Count(10), 90, [("dead_letters", 1, None)]),
        (Count(0), 90, [("dead_letters", 2, None)]),
        (Count(0, exact=False), 0, [("dead_letters", 1, None)]),
        (Count(0, exact=False), 10, [("dead_letters", 1, None)]),
        (Count(0, exact=False), 11, [("recent_dead_letters", 0, None), ("dead_letters", 1, None)]),
        (Count(11, exact=False), 0, [("recent_dead_letters", 0, None), ("dead_letters", 1, None)]),
    ],
)
def test_recent_dead_letters_are_those_of_the_log_unless_it_is_too_long(recent, counted, expected):
    found = failing([(1000, 0, counted)], recent_dead_letters=recent, dead_letters=Count(90))
    assert found == expected
