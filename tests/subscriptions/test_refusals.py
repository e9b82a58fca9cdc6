"""@subscriber: what it refuses."""

from __future__ import annotations

import asyncio
import functools

import pytest
from django.db import InterfaceError, OperationalError

from django_mysqlqueue import StaleDelivery, SubscriberError, subscriber
from tests.support.internals import handlers
from tests.support.registered import AsyncCallable, Methods, coroutine_function, handle, only

pytestmark = pytest.mark.any_engine


def generator_function(delivery):
    yield


async def async_generator_function(delivery):
    yield


class GeneratorCallable:
    def __call__(self, delivery):
        yield


@pytest.mark.parametrize(
    "function",
    [
        generator_function,
        async_generator_function,
        GeneratorCallable(),
        Methods().generator,
        Methods.static_generator,
        lambda delivery: (yield),
        functools.partial(generator_function),
    ],
)
def test_generator_functions_are_refused(function):
    with pytest.raises(SubscriberError, match="is a generator function, whose body would never run"):
        subscriber("t", group="g")(function)
    assert handlers() == {}


@pytest.mark.parametrize(
    "function",
    [
        coroutine_function,
        AsyncCallable(),
        Methods().coroutine,
        functools.partial(coroutine_function),
    ],
)
def test_async_handlers_cannot_be_atomic(function):
    with pytest.raises(SubscriberError, match="an async handler cannot be atomic"):
        subscriber("t", group="g", atomic=True)(function)
    assert handlers() == {}


def test_async_handlers_cannot_be_made_atomic_by_the_setting(settings):
    subscriber("t", group="g")(coroutine_function)
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"ATOMIC": True}}}
    with pytest.raises(SubscriberError, match=r"registered\.coroutine_function: an async handler cannot be atomic"):
        handlers()


@pytest.mark.parametrize("function", [coroutine_function, AsyncCallable(), functools.partial(coroutine_function)])
def test_a_timeout_of_an_async_handler(function, settings):
    subscriber("t", group="g", timeout=5)(function)
    assert only().timeout == 5.0
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"TIMEOUT": None}}}
    assert only().timeout is None
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"TIMEOUT": 0.5}}}
    assert only().timeout == 0.5


@pytest.mark.parametrize(("timeout", "longest"), [(5, 5), (6, 5), (600, None)])
def test_a_timeout_must_be_below_max_processing_time(timeout, longest):
    """At equal times the process would leave in the same moment."""
    options = {} if longest is None else {"max_processing_time": longest}
    said = f"timeout={timeout} must be less than max_processing_time={longest or 600}"

    def declare():
        subscriber("t", group="g", timeout=timeout, **options)(coroutine_function)
        handlers()

    with pytest.raises(SubscriberError, match=said):
        declare()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"TIMEOUT": 700}, "timeout=700 must be less than max_processing_time=600"),
        ({"MAX_PROCESSING_TIME": 3}, "timeout=4 must be less than max_processing_time=3"),
    ],
)
def test_a_timeout_that_the_setting_puts_above_max_processing_time(settings, given, said):
    subscriber("t", group="g", timeout=4)(coroutine_function)
    settings.MYSQLQUEUE = {"GROUPS": {"g": given}}
    with pytest.raises(SubscriberError, match=said):
        handlers()


def test_the_setting_cannot_give_a_sync_handler_a_timeout(settings):
    subscriber("t", group="g")(handle)
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"TIMEOUT": 5}}}
    with pytest.raises(SubscriberError, match="handle: timeout=5 requires an async handler"):
        handlers()


@pytest.mark.parametrize("function", [coroutine_function, AsyncCallable(), functools.partial(coroutine_function)])
def test_the_concurrency_of_an_async_handler(function, settings):
    subscriber("t", group="g", concurrency=5)(function)
    assert only().concurrency == 5
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"CONCURRENCY": None}}}
    assert only().concurrency is None
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"CONCURRENCY": 10_000}}}
    assert only().concurrency == 10_000


@pytest.mark.parametrize("value", [0, -1, 10_001, 1.5, "5", True])
def test_a_concurrency_that_is_no_number_of_calls(value):
    with pytest.raises(SubscriberError, match=r"concurrency=.*must be (from 1 to 10000|an integer)"):
        subscriber("t", group="g", concurrency=value)(coroutine_function)
    assert handlers() == {}


def test_a_sync_handler_has_no_concurrency(settings):
    said = "requires an async handler: THREADS limits how many calls of sync handlers run at a time"
    with pytest.raises(SubscriberError, match=f"handle: concurrency=5 {said}"):
        subscriber("t", group="g", concurrency=5)(handle)
    assert handlers() == {}
    subscriber("t", group="g", concurrency=None)(handle)
    assert only().concurrency is None
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"CONCURRENCY": 5}}}
    with pytest.raises(SubscriberError, match=f"handle: concurrency=5 {said}"):
        handlers()


def test_batch_size():
    subscriber("t", group="g", batch=True)(handle)
    subscriber("t", group="h", batch=True, batch_size=7)(handle)
    subscriber("t", group="i")(handle)
    found = {ref.group: (one.batch, one.batch_size) for ref, one in handlers().items()}
    assert found == {"g": (True, 100), "h": (True, 7), "i": (False, 1)}


def test_batch_size_of_the_setting_counts_for_batch_handlers(settings):
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"BATCH_SIZE": 9}}}
    subscriber("t", group="g", batch=True, batch_size=7)(handle)
    subscriber("u", group="g")(handle)
    assert {ref.topic: one.batch_size for ref, one in handlers().items()} == {"t": 9, "u": 1}


def test_batch_size_belongs_to_batch():
    with pytest.raises(SubscriberError, match="batch_size=7 requires batch=True"):
        subscriber("t", group="g", batch_size=7)(handle)
    with pytest.raises(SubscriberError, match="batch_size=0: must be from 1 to 10000"):
        subscriber("t", group="g", batch=True, batch_size=0)(handle)
    assert handlers() == {}


@pytest.mark.parametrize("thing", [None, 1, "handle", object()])
def test_only_callables(thing):
    with pytest.raises(SubscriberError, match="is not callable"):
        subscriber("t", group="g")(thing)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"topic": ""}, "topic ''"),
        ({"topic": "a b"}, "topic 'a b'"),
        ({"topic": None}, "topic None"),
        ({"topic": "x" * 101}, "must be 1 to 100 letters"),
        ({"group": ""}, "group ''"),
        ({"group": "a/b"}, "group 'a/b'"),
        ({"group": "é"}, "group 'é'"),
        ({"group": 1}, "group 1"),
        ({"mode": "parallel"}, "mode='parallel': must be one of 'ordered', 'shared'"),
        ({"mode": None}, "mode=None"),
        ({"atomic": 1}, "atomic=1: must be True or False"),
        ({"start": "now"}, "start='now': must be one of 'earliest', 'latest'"),
        ({"start": 5}, "start=5"),
        ({"on_failure": "stop"}, "on_failure='stop'"),
        ({"max_attempts": 0}, "max_attempts=0: must be from 1"),
        ({"max_attempts": -1}, "max_attempts=-1"),
        ({"max_attempts": True}, "max_attempts=True: must be an integer"),
        ({"max_attempts": 1.0}, "max_attempts=1.0"),
        ({"visibility_timeout": 0}, "visibility_timeout=0: must be at least 0.1"),
        ({"visibility_timeout": None}, "visibility_timeout=None: must be a number of seconds"),
        ({"visibility_timeout": 31 * 86400}, "at most 2,592,000"),
        ({"max_processing_time": "600"}, "max_processing_time='600'"),
        ({"backoff": 5}, "must be a Backoff or a dict"),
        ({"backoff": None}, "must be a Backoff or a dict"),
        ({"backoff": {"initial": -1}}, "initial -1"),
        ({"backoff": {"first": 1}}, "unknown key 'first'"),
        ({"timeout": 0}, "timeout=0: must be above 0"),
        ({"timeout": "5"}, "timeout='5': must be a number of seconds"),
        (
            {"timeout": 5},
            "timeout=5 requires an async handler: a sync handler runs in a thread, which cannot be stopped",
        ),
        ({"reject_on": ()}, "reject_on=(): must name at least one exception class"),
        ({"retry_on": []}, "retry_on=[]: must name at least one exception class"),
        ({"reject_on": "ValueError"}, "reject_on='ValueError': must be a subclass of Exception"),
        ({"reject_on": ValueError("no")}, "must be a subclass of Exception"),
        ({"retry_on": (ValueError, None)}, "must be a subclass of Exception"),
        ({"retry_on": None}, "retry_on=None: must be a subclass of Exception"),
        ({"retry_on": SystemExit}, "must be a subclass of Exception"),
        ({"reject_on": asyncio.CancelledError}, "must be a subclass of Exception"),
        ({"reject_on": ExceptionGroup}, "must not name an exception group"),
        ({"reject_on": OperationalError}, "must not name OperationalError: it is always retried"),
        ({"reject_on": (ValueError, InterfaceError)}, "must not name InterfaceError: it is always retried"),
        ({"reject_on": StaleDelivery}, "must not name StaleDelivery: it is always retried"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_options_are_refused_at_decoration(arguments, said):
    arguments = {"topic": "t", "group": "g", **arguments}
    with pytest.raises(SubscriberError) as raised:
        subscriber(**arguments)(handle)
    text = str(raised.value)
    assert said in text
    assert ".handle: " in text
    assert repr(arguments["topic"]) in text
    assert handlers() == {}


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="retries"):
        subscriber("t", group="g", retries=3)
