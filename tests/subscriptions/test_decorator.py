"""@subscriber: what it takes."""

from __future__ import annotations

from dataclasses import fields

import pytest
from django.test import override_settings

from django_mysqlqueue import SubscriberError, subscriber
from django_mysqlqueue.options.backoff import Backoff
from tests.support.internals import OPTIONS, GroupRef, Handler, handlers
from tests.support.registered import handle, only

pytestmark = pytest.mark.any_engine


def test_the_function_stays_a_function():
    assert subscriber("t", group="g")(handle) is handle


def test_group_is_required_and_by_name():
    with pytest.raises(TypeError):
        subscriber("t")
    with pytest.raises(TypeError):
        subscriber("t", "g")


def test_the_table_has_every_option_of_a_handler_and_no_other():
    of_a_handler = {field.name for field in fields(Handler)} - {"ref", "function", "where", "batch", "is_async"}
    assert of_a_handler == set(OPTIONS)


def test_an_option_that_does_not_exist_is_refused_with_the_nearest_one():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'max_attempt'. Did you mean max_attempts\?"):
        subscriber("t", group="g", max_attempt=3)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'allowed_users'"):
        subscriber("t", group="g", allowed_users=["billing@%"])


def test_defaults_come_from_the_setting():
    subscriber("t", group="g")(handle)
    assert handlers() == {
        GroupRef("g", "t"): Handler(
            ref=GroupRef("g", "t"),
            function=handle,
            where="tests.support.registered.handle",
            mode="ordered",
            atomic=False,
            start="earliest",
            on_failure="skip",
            max_attempts=5,
            visibility_timeout=60.0,
            max_processing_time=600.0,
            backoff=Backoff(),
        )
    }


GENERAL = {"MAX_ATTEMPTS": 2, "VISIBILITY_TIMEOUT": 20, "MAX_PROCESSING_TIME": 200, "BACKOFF": {"initial": 2}}
DECORATED = {"max_attempts": 3, "visibility_timeout": 30, "max_processing_time": 300, "backoff": {"initial": 3}}
GROUP = {"MAX_ATTEMPTS": 4, "VISIBILITY_TIMEOUT": 40, "MAX_PROCESSING_TIME": 400, "BACKOFF": {"initial": 4}}


@pytest.mark.parametrize(
    ("general", "decorated", "group", "wins"),
    [
        (GENERAL, {}, {}, 2),
        (GENERAL, DECORATED, {}, 3),
        (GENERAL, {}, GROUP, 4),
        (GENERAL, DECORATED, GROUP, 4),
        ({}, DECORATED, {}, 3),
    ],
)
def test_group_setting_over_decorator_over_setting(general, decorated, group, wins):
    subscriber("t", group="g", **decorated)(handle)
    with override_settings(MYSQLQUEUE={**general, "GROUPS": {"g": group}}):
        handler = only()
    assert handler.max_attempts == wins
    assert handler.visibility_timeout == wins * 10
    assert handler.max_processing_time == wins * 100
    assert handler.backoff == Backoff(initial=wins)


def test_group_setting_overrides_what_the_decorator_defaults(settings):
    settings.MYSQLQUEUE = {
        "GROUPS": {
            "g": {"MODE": "shared", "ATOMIC": True, "START": "latest"},
            "strict": {"ON_FAILURE": "block"},
        }
    }
    subscriber("t", group="g")(handle)
    subscriber("t", group="strict")(handle)
    subscriber("t", group="other")(handle)
    found = handlers()
    handler = found[GroupRef("g", "t")]
    assert (handler.mode, handler.atomic, handler.start, handler.on_failure) == ("shared", True, "latest", "skip")
    assert handler.shared
    assert found[GroupRef("strict", "t")].on_failure == "block"
    assert found[GroupRef("other", "t")].mode == "ordered"


def test_strict_order_needs_an_order(settings):
    with pytest.raises(SubscriberError, match="on_failure='block' keeps the order of a partition, but mode='shared'"):
        subscriber("t", group="g", mode="shared", on_failure="block")(handle)
    assert handlers() == {}
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"MODE": "shared"}}}
    subscriber("t", group="g", on_failure="block")(handle)
    with pytest.raises(SubscriberError, match="Use mode='ordered'"):
        handlers()


def test_the_decorator_without_arguments_is_explained():
    with pytest.raises(SubscriberError, match=r"on .*\.handle needs arguments: @subscriber\(topic, group"):
        subscriber(handle, group="g")


def test_group_setting_serves_all_topics_of_the_group(settings):
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"MAX_ATTEMPTS": 9}}}
    subscriber("a", group="g")(handle)
    subscriber("b", group="g", max_attempts=2)(handle)
    assert [handler.max_attempts for handler in handlers().values()] == [9, 9]


def test_none_attempts_is_no_limit_and_not_the_settings():
    subscriber("t", group="g", max_attempts=None)(handle)
    assert only().max_attempts is None


@pytest.mark.parametrize("backoff", [Backoff(initial=9), {"initial": 9}, {"INITIAL": 9.0}])
def test_backoff_as_object_or_dict(backoff):
    subscriber("t", group="g", backoff=backoff)(handle)
    assert only().backoff == Backoff(initial=9)


def test_a_dead_letter_topic_may_have_a_handler():
    subscriber("t_dlq", group="g")(handle)
    assert only().ref == GroupRef("g", "t_dlq")


def test_the_dead_letter_topic_of_the_longest_topic_may_have_a_handler():
    subscriber("t" * 100 + "_dlq", group="g")(handle)
