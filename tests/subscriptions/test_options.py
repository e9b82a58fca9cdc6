"""Options that operators can override: the rules, their texts, and what applies."""

from __future__ import annotations

import json
import re

import pytest

from django_mysqlqueue import subscriber
from django_mysqlqueue.exceptions import SubscriberError
from django_mysqlqueue.options.backoff import Backoff
from django_mysqlqueue.options.delivery_limits import LIMIT_OPTIONS, parse_rate
from tests.support.harness import handler
from tests.support.internals import (
    OVERRIDABLE,
    GroupRef,
    OptionColumns,
    Override,
    as_text,
    check_override,
    effective_options,
    overridden,
    parse_text,
    storable,
    stored,
)
from tests.support.registered import coroutine_function, handle, handlers

pytestmark = pytest.mark.any_engine

WAITS = {"initial": 2.0, "factor": 2.0, "maximum": 600.0, "jitter": 0.1}


@pytest.mark.parametrize(
    ("name", "text", "value", "again"),
    [
        ("max_attempts", "3", 3, "3"),
        ("max_attempts", " None ", None, "none"),
        ("claim_size", "500", 500, "500"),
        ("poll_interval", "20ms", 0.02, "0.02s"),
        ("poll_interval", "0.01ms", 0.00001, "0.00001s"),
        ("timeout", "123456.7", 123456.7, "123456.7s"),
        ("visibility_timeout", "30d", 2592000.0, "2592000s"),
        ("backoff", "maximum=15d, Jitter=0", {"maximum": 1296000.0, "jitter": 0.0}, "maximum=1296000s,jitter=0"),
        ("visibility_timeout", "90", 90.0, "90s"),
        ("visibility_timeout", "5m", 300.0, "300s"),
        ("visibility_timeout", "1.5 H", 5400.0, "5400s"),
        ("visibility_timeout", "2d", 172800.0, "172800s"),
        ("timeout", "none", None, "none"),
        ("backoff", "initial=2s,factor=3", {"initial": 2.0, "factor": 3.0}, "initial=2s,factor=3"),
        ("backoff", "maximum=1h", {"maximum": 3600.0}, "maximum=3600s"),
        ("rate_per_key", " 5/m ", "5/m", "5/m"),
        ("rate_per_key", '{"ä,=":"5/m", "*":null}', {"ä,=": "5/m", "*": None}, '{"ä,=": "5/m", "*": null}'),
    ],
)
def test_a_text_stands_for_a_value_and_back(name, text, value, again):
    assert parse_text(name, text) == value
    assert as_text(name, value) == again
    assert parse_text(name, again) == value


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("max_attempts", "three", "max_attempts='three': must be an integer"),
        ("max_attempts", "3.5", "max_attempts='3.5': must be an integer"),
        ("timeout", "5 weeks", "timeout='5 weeks': must be a number of seconds"),
        ("timeout", "-5", "timeout='-5': must be a number of seconds"),
        ("timeout", "nan", "timeout='nan': must be a number"),
        ("backoff", "fast", "backoff='fast': must be a list such as initial=1s"),
        ("backoff", "initial=x", "initial='x': must be a number of seconds"),
        ("backoff", "factor=2m", "factor='2m': must be a number"),
        ("backoff", "initial=1,initial=2", "initial is given twice"),
        ("max_attempts", "1_0", "max_attempts='1_0': must be an integer"),
        ("max_attempts", "\u0661\u0660", "must be an integer"),
        ("visibility_timeout", "none", "visibility_timeout='none': must be a number of seconds"),
        ("claim_size", "none", "claim_size='none': must be an integer"),
        ("claim_size", "", "claim_size='': must be an integer"),
        ("filter", '{"a": ["x"], "a": ["y"]}', "'a' is given twice in one object"),
    ],
)
def test_a_text_that_is_no_value_is_refused_with_the_rule(name, text, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        parse_text(name, text)


def test_what_is_stored_is_json_and_is_read_as_the_same_value():
    one = Backoff(initial=2.0, maximum=600.0, jitter=0.1)
    assert check_override(None, "backoff", json.loads(json.dumps(storable(one)))) == one
    assert as_text("backoff", one) == as_text("backoff", storable(one))


ASYNC = {"is_async": True}


@pytest.mark.parametrize(
    ("options", "name", "value", "says"),
    [
        ({}, "max_attempts", 0, "max_attempts=0: must be from 1"),
        ({}, "max_attempt", 3, "there is no option 'max_attempt'. Did you mean max_attempts?"),
        ({}, "colour", 3, "there is no option 'colour'. Options: claim_size, prefetch"),
        ({}, "mode", "shared", "mode cannot change while subscribers run"),
        ({}, "batch", True, "batch cannot change while subscribers run"),
        ({}, "reject_on", ValueError, "reject_on cannot change while subscribers run"),
        ({}, "max_processing_time", 5, "max_processing_time cannot change while subscribers run"),
        ({}, "batch_size", 5, "batch_size=5 requires a handler with batch=True"),
        ({}, "visibility_timeout", 5, "visibility_timeout=5 has no effect in ordered mode"),
        ({"mode": "shared"}, "visibility_timeout", 0, "visibility_timeout=0: must be at least 0.1"),
        ({}, "timeout", 5, "timeout=5 requires an async handler"),
        ({}, "concurrency", 5, "concurrency=5 requires an async handler"),
        ({"is_async": True}, "concurrency", 0, "concurrency=0: must be from 1 to 10000"),
        ({"is_async": True}, "concurrency", 10_001, "concurrency=10001: must be from 1 to 10000"),
        ({"is_async": True}, "concurrency", 1.5, "concurrency=1.5: must be an integer"),
        ({"topic": "t_dlq"}, "max_attempts", 5, "max_attempts=5 has no effect on a DLQ topic"),
        ({}, "prefetch", 1.5, "prefetch=1.5: must be an integer"),
        ({}, "priority_share", 1, "priority_share=1: must be 0, or 2 or more"),
        ({}, "priority_share", -1, "priority_share=-1: must be from 0 to 1000000"),
        ({}, "backoff", {"first": 1}, "has the unknown key 'first'"),
        ({}, "rate", "0/s", "rate='0/s': must be at least 1: to stop a group, pause it"),
        ({}, "rate", 5, "rate=5: must be a number and a unit, such as '100/s', '5/m', '1000/h' or '1/d'"),
        ({}, "rate_per_key", "10001/s", "rate_per_key='10001/s': must be at most 10000 per second"),
        ({}, "rate_per_key", {"a": "5/w"}, "rate_per_key={'a': '5/w'}: has '5/w' for 'a': a rate must be a number"),
        ({}, "rate_per_key", {}, "rate_per_key={}: must have a rate for at least one key, or for '*': all other keys"),
        ({}, "rate", {"a": "5/s"}, "rate={'a': '5/s'}: must be a number and a unit"),
        ({}, "burst", 0, "burst=0: must be from 1"),
        ({}, "max_in_flight", 0, "max_in_flight=0: must be from 1"),
        ({}, "limit_by", "", "limit_by='': must be the name of a field of the metadata"),
        ({}, "limit_by", "a\nb", "must consist of printable characters"),
        ({}, "limit_by", "mysqlqueue.key", "names that start with 'mysqlqueue.' are reserved"),
        ({}, "poll_interval", 0.0001, "poll_interval=0.0001: must be at least 0.001"),
        ({}, "allowed_users", [], "allowed_users=[]: must have 1 to 50 accounts; None: all users"),
        ({}, "allowed_users", "a@b", "allowed_users='a@b': must be a list of accounts such as 'billing@%'"),
        ({}, "allowed_users", ["billing"], "has 'billing', which must be USER@HOST without spaces and commas"),
        ({}, "filter", {}, "filter={}: filter: must not be empty. To receive all messages, leave the filter out"),
        ({}, "filter", {"region": "eu"}, "filter['region']: must be a list of values or a dict of nested keys"),
        ({}, "filter", {"n": [{"size": 3}]}, "filter['n'][0]: "),
        ({}, "filter", {"mysqlqueue.key": ["a"]}, "names that start with 'mysqlqueue.' are reserved"),
    ],
)
def test_an_override_that_is_not_possible_is_refused_with_the_rule(options, name, value, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        check_override(handler(**options), name, value)


@pytest.mark.parametrize("name", sorted({*OVERRIDABLE} - {"paused_tasks"}))  # That one is for queues of jobs alone.
def test_every_option_can_be_overridden_for_some_handler(name):
    values = {
        "backoff": WAITS,
        "poll_interval": 0.5,
        "max_poll_interval": 5.0,
        "visibility_timeout": 5.0,
        "timeout": 5.0,
        "rate": "7/s",
        "rate_per_key": "7/m",
        "filter": {"region": ["eu"]},
        "limit_by": "tenant",
        "allowed_users": ["billing@%"],
    }
    value = values.get(name, 7)
    limits = {"burst": {"rate": parse_rate("1/s")}, "limit_by": {"max_in_flight_per_key": 1}}
    one = handler(mode="shared", batch=True, is_async=True, **limits.get(name, {}))
    after, ignored = with_overrides(one, column(**{name: value}))
    assert storable(getattr(after, name)) == value
    assert after != one
    assert ignored == []


def with_overrides(one, text):
    """As a subscriber applies the column."""
    after, ignored = overridden(one, {each.name: each.value for each in stored(text)})
    return after, list(ignored.values())


@pytest.mark.parametrize("name", OVERRIDABLE)
def test_none_is_a_value_where_the_option_may_be_none(name):
    def accepts(parse):
        try:
            return parse() is None
        except ValueError:
            return False

    assert accepts(lambda: parse_text(name, "none")) == accepts(lambda: check_override(None, name, None))


def column(**values):
    return json.dumps({name: {"value": value, "at": 5, "by": "ada"} for name, value in values.items()})


def test_overrides_that_the_code_no_longer_knows_do_not_stop_the_others():
    one = handler()
    after, ignored = with_overrides(one, column(colour="red", max_attempts=9, visibility_timeout=5, prefetch="many"))
    assert after.max_attempts == 9
    assert [text.split("=")[0].split(".")[0] for text in sorted(ignored)] == [
        "prefetch",
        "there is no option 'colour'",
        "visibility_timeout",
    ]


@pytest.mark.parametrize(
    ("text", "attempts"),
    [
        ("[]", 5),
        ("null", 5),
        ('"x"', 5),
        ("7", 5),
        ('{"max_attempts": 3}', 3),
        ('{"max_attempts": null}', None),
        ('{"max_attempts": []}', 5),
        ('{"max_attempts": {"value": 3}}', 3),
        ('{"max_attempts": {"value": 3, "at": "now", "by": 7}}', 3),
        ('{"max_attempts": {"at": 5, "by": "ada"}}', 5),
        ('{"backoff": {"initial": "x"}, "max_attempts": 3}', 3),
        ('{"prefetch": NaN, "": 1, "max_attempts": 3}', 3),
    ],
)
def test_whatever_plain_sql_has_stored_stops_nobody(text, attempts):
    after, ignored = with_overrides(handler(), text)
    assert after.max_attempts == attempts
    assert all(isinstance(one, str) for one in ignored)
    for one in stored(text):
        assert isinstance(one.text, str)
        assert isinstance(one.at, int)
        assert isinstance(one.by, str)


@pytest.mark.parametrize(
    ("values", "applied"),
    [
        ({"poll_interval": 3.0}, (None, None)),
        ({"max_poll_interval": 0.05}, (None, None)),
        ({"poll_interval": 3.0, "max_poll_interval": 9.0}, (3.0, 9.0)),
    ],
)
def test_overrides_count_together(values, applied):
    after, ignored = with_overrides(handler(), column(max_attempts=2, **values))
    assert (after.poll_interval, after.max_poll_interval) == applied
    assert after.max_attempts == 2
    assert bool(ignored) == (applied == (None, None))


def test_a_timeout_beyond_the_longest_processing_time_is_ignored():
    after, ignored = with_overrides(handler(is_async=True, max_processing_time=10), column(timeout=11))
    assert after.timeout is None
    assert "timeout=11 must be less than max_processing_time=10" in ignored[0]


# -- of a subscription --------------------------------------------------------


def test_each_subscription_has_its_own(settings, no_handlers):
    settings.MYSQLQUEUE = {"CLAIM_SIZE": 50, "PREFETCH": 60, "GROUPS": {"h": {"PREFETCH": 5, "MAX_POLL_INTERVAL": 9}}}
    own = {"claim_size": 7, "prefetch": 8, "poll_interval": 0.5, "max_poll_interval": 2}
    subscriber("t", group="g", **own)(handle)
    subscriber("t", group="h", **own)(handle)
    subscriber("t", group="i")(handle)
    found = {
        ref.group: (one.claim_size, one.prefetch, one.poll_interval, one.max_poll_interval)
        for ref, one in handlers().items()
    }
    assert found == {"g": (7, 8, 0.5, 2.0), "h": (7, 5, 0.5, 9.0), "i": (None, None, None, None)}


@pytest.mark.parametrize("often", [{"poll_interval": 2}, {"poll_interval": 9, "max_poll_interval": 8}])
def test_a_poll_interval_beyond_the_longest_is_refused(no_handlers, often):
    def declare():
        subscriber("t", group="g", **often)(handle)
        handlers()

    with pytest.raises(SubscriberError, match=r"poll_interval=\d must be at most max_poll_interval=\d"):
        declare()


def columns(*overrides, **registered):
    given = {one.name: {"value": one.value, "at": one.at, "by": one.by} for one in overrides}
    return OptionColumns(overrides=json.dumps(given), **registered)


def test_where_options_come_from(settings, no_handlers):
    settings.MYSQLQUEUE = {"CLAIM_SIZE": 50, "MAX_ATTEMPTS": 4, "GROUPS": {"g": {"PREFETCH": 5}}}
    subscriber("t", group="g", backoff={"initial": 2}, timeout=5)(coroutine_function)
    overrides = [Override("max_attempts", 9, 1000, "ada"), Override("colour", "red", 1000, "ada")]
    found = effective_options(GroupRef("g", "t"), columns(*overrides, limits='{"rate": "5/s"}'))
    assert [(one.name, one.text, one.code_text, one.source) for one in found] == [
        ("claim_size", "50", "50", "MYSQLQUEUE"),
        ("prefetch", "5", "5", "GROUPS"),
        ("priority_share", "16", "16", "default"),
        ("poll_interval", "0.1s", "0.1s", "default"),
        ("max_poll_interval", "1s", "1s", "default"),
        ("max_attempts", "9", "4", "MYSQLQUEUE"),
        ("backoff", *["initial=2s,factor=2,maximum=3600s,jitter=0.2"] * 2, "@subscriber"),
        ("timeout", "5s", "5s", "@subscriber"),
        ("concurrency", "none", "none", "default"),
        ("rate", "5/s", "none", "default"),
        *[(name, "none", "none", "default") for name in (*LIMIT_OPTIONS[1:], "filter", "allowed_users")],
        ("colour", "none", "none", ""),
    ]
    assert [one.override and one.override.value for one in found] == [None] * 5 + [9, *[None] * 11, "red"]
    assert [bool(one.ignored) for one in found] == [False] * 17 + [True]
    assert [one.registered_text for one in found if one.registered_text] == ["5/s"]


def test_an_override_that_subscribers_ignore_is_shown_as_ignored(no_handlers):
    subscriber("t", group="g")(handle)
    override = Override("poll_interval", 3.0, 5, "ada")
    found = {one.name: one for one in effective_options(GroupRef("g", "t"), columns(override))}
    assert found["poll_interval"].text == "0.1s"
    assert "must be at most max_poll_interval" in found["poll_interval"].ignored


def test_of_a_group_without_a_handler_only_overrides_are_known(no_handlers):
    (one,) = effective_options(GroupRef("g", "t"), columns(Override("max_attempts", 9, 1000, "ada")))
    assert (one.name, one.text, one.source, one.ignored) == ("max_attempts", "9", "", "")
