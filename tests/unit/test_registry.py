"""@subscriber: what it refuses, how handlers are found and resolved."""

import asyncio
import functools
import importlib
import inspect
import sys
import textwrap
import types

import pytest
from django.db import InterfaceError, OperationalError
from django.test import override_settings

from django_mysqlqueue import StaleDelivery, SubscriberError, subscriber
from django_mysqlqueue.conf import Backoff
from django_mysqlqueue.runtime.handling import registry
from django_mysqlqueue.runtime.handling.handler import Handler
from django_mysqlqueue.runtime.handling.registry import handlers
from django_mysqlqueue.service.refs import GroupRef

pytestmark = pytest.mark.any_engine


@pytest.fixture(scope="module", autouse=True)
def discovered():
    """What the test project declares is imported before the registry is emptied."""
    registry.discover()


@pytest.fixture(autouse=True)
def alone(discovered, no_handlers):
    """An empty registry; it is put back afterwards."""


def handle(delivery):
    return None


def only():
    """The one resolved handler."""
    (handler,) = handlers().values()
    return handler


# -- declaring ----------------------------------------------------------------


def test_the_function_stays_a_function():
    assert subscriber("t", group="g")(handle) is handle


def test_group_is_required_and_by_name():
    with pytest.raises(TypeError):
        subscriber("t")
    with pytest.raises(TypeError):
        subscriber("t", "g")


def test_signature_is_the_published_one():
    parameters = inspect.signature(subscriber).parameters
    assert list(parameters) == [
        "topic",
        "group",
        "mode",
        "atomic",
        "start",
        "on_failure",
        "max_attempts",
        "visibility_timeout",
        "max_processing_time",
        "timeout",
        "backoff",
        "reject_on",
        "retry_on",
        "batch",
        "batch_size",
    ]
    assert (parameters["mode"].default, parameters["atomic"].default) == ("ordered", False)
    assert (parameters["start"].default, parameters["on_failure"].default) == ("earliest", "skip")


def test_defaults_come_from_the_setting():
    subscriber("t", group="g")(handle)
    assert handlers() == {
        GroupRef("g", "t"): Handler(
            ref=GroupRef("g", "t"),
            function=handle,
            where="tests.unit.test_registry.handle",
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
    with pytest.raises(SubscriberError, match="on_failure='block' keeps the order of a partition, and mode='shared'"):
        subscriber("t", group="g", mode="shared", on_failure="block")(handle)
    assert handlers() == {}
    settings.MYSQLQUEUE = {"GROUPS": {"g": {"MODE": "shared"}}}
    subscriber("t", group="g", on_failure="block")(handle)
    with pytest.raises(SubscriberError, match="use mode='ordered'"):
        handlers()


def test_the_decorator_without_arguments_is_explained():
    with pytest.raises(SubscriberError, match=r"on .*\.handle lacks its arguments: @subscriber\(topic, group"):
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


# -- refusals -----------------------------------------------------------------


async def coroutine_function(delivery):
    pass


def generator_function(delivery):
    yield


async def async_generator_function(delivery):
    yield


class Callable:
    def __call__(self, delivery):
        return "called", delivery


class GeneratorCallable:
    def __call__(self, delivery):
        yield


class AsyncCallable:
    async def __call__(self, delivery):
        return "awaited", delivery


class Methods:
    def generator(self, delivery):
        yield

    async def coroutine(self, delivery):
        return "awaited", delivery

    def plain(self, delivery):
        return "called", delivery

    @staticmethod
    def static_generator(delivery):
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
    with pytest.raises(SubscriberError, match=r"test_registry\.coroutine_function: an async handler cannot be atomic"):
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
    said = f"timeout={timeout} must be below max_processing_time={longest or 600}"

    def declare():
        subscriber("t", group="g", timeout=timeout, **options)(coroutine_function)
        handlers()

    with pytest.raises(SubscriberError, match=said):
        declare()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"TIMEOUT": 700}, "timeout=700 must be below max_processing_time=600"),
        ({"MAX_PROCESSING_TIME": 3}, "timeout=4 must be below max_processing_time=3"),
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
    with pytest.raises(SubscriberError, match="handle: timeout=5 is for async handlers"):
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
    with pytest.raises(SubscriberError, match="batch_size=7 without batch=True"):
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
        ({"topic": "x" * 101}, "must be 1 to 100 characters"),
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
        ({"max_attempts": True}, "max_attempts=True: must be a whole number"),
        ({"max_attempts": 1.0}, "max_attempts=1.0"),
        ({"visibility_timeout": 0}, "visibility_timeout=0: must be above 0"),
        ({"visibility_timeout": None}, "visibility_timeout=None: must be a number of seconds"),
        ({"visibility_timeout": 31 * 86400}, "at most 2.592e+06"),
        ({"max_processing_time": "600"}, "max_processing_time='600'"),
        ({"backoff": 5}, "must be a Backoff or a dict"),
        ({"backoff": None}, "must be a Backoff or a dict"),
        ({"backoff": {"initial": -1}}, "initial -1"),
        ({"backoff": {"first": 1}}, "unknown key 'first'"),
        ({"timeout": 0}, "timeout=0: must be above 0"),
        ({"timeout": "5"}, "timeout='5': must be a number of seconds"),
        ({"timeout": 5}, "timeout=5 is for async handlers: a sync handler runs in a thread, which cannot be ended"),
        ({"reject_on": ()}, "reject_on=(): must name at least one exception class"),
        ({"retry_on": []}, "retry_on=[]: must name at least one exception class"),
        ({"reject_on": "ValueError"}, "reject_on='ValueError': must be a subclass of Exception"),
        ({"reject_on": ValueError("no")}, "must be a subclass of Exception"),
        ({"retry_on": (ValueError, None)}, "must be a subclass of Exception"),
        ({"retry_on": None}, "retry_on=None: must be a subclass of Exception"),
        ({"retry_on": SystemExit}, "must be a subclass of Exception"),
        ({"reject_on": asyncio.CancelledError}, "must be a subclass of Exception"),
        ({"reject_on": ExceptionGroup}, "must name the exceptions inside groups"),
        ({"reject_on": OperationalError}, "must not name OperationalError, which is always retried"),
        ({"reject_on": (ValueError, InterfaceError)}, "must not name InterfaceError, which is always retried"),
        ({"reject_on": StaleDelivery}, "must not name StaleDelivery, which is always retried"),
    ],
    ids=lambda value: repr(value)[:40],
)
@pytest.mark.defect(11)
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


# -- duplicates ---------------------------------------------------------------


def another(delivery):
    return None


def test_two_handlers_for_one_group_and_topic_are_refused_at_start_up():
    subscriber("t", group="g")(handle)
    subscriber("t", group="g")(another)
    with pytest.raises(SubscriberError) as raised:
        handlers()
    text = str(raised.value)
    assert "test_registry.handle" in text
    assert "test_registry.another" in text
    assert "'g'" in text
    assert "'t'" in text


def test_two_functions_of_one_name_are_refused_too():
    """As when a handler was copied within its module and only its body changed."""

    @subscriber("t", group="g")
    def copied(delivery):
        return 1

    @subscriber("t", group="g")
    def copied(delivery):  # noqa: F811
        return 2

    with pytest.raises(SubscriberError, match="Two handlers"):
        handlers()


def test_two_instances_of_one_class_are_two_handlers():
    subscriber("t", group="g")(Callable())
    subscriber("t", group="g")(Callable())
    with pytest.raises(SubscriberError, match="Two handlers"):
        handlers()


def test_one_function_may_handle_several_groups_and_topics():
    for topic, group in (("a", "g"), ("b", "g"), ("a", "h")):
        subscriber(topic, group=group)(handle)
    assert set(handlers()) == {GroupRef("g", "a"), GroupRef("g", "b"), GroupRef("h", "a")}


def test_a_module_imported_again_replaces_its_handlers():
    """As under importlib.reload."""
    subscriber("t", group="g")(handle)
    again = types.FunctionType(handle.__code__, handle.__globals__, "handle")
    subscriber("t", group="g")(again)
    assert only().function is again


# -- discovery ----------------------------------------------------------------


@pytest.fixture
def app(tmp_path, monkeypatch):
    """Makes an app whose ``subscribers.py`` has the given source; returns its name."""
    names = []

    def make(source, name="hb_app"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").touch()
        if source is not None:
            (package / "subscribers.py").write_text(textwrap.dedent(source))
        names.append(name)
        importlib.invalidate_caches()
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in list(sys.modules):
        if name.split(".")[0] in names:
            del sys.modules[name]


DECLARING = """
    from django_mysqlqueue import subscriber

    @subscriber("t", group="{group}")
    def handle(delivery):
        pass
"""


def test_handlers_of_every_installed_app_are_found(app, settings):
    one = app(DECLARING.format(group="one"), "hb_one")
    two = app(DECLARING.format(group="two"), "hb_two")
    without = app(None, "hb_without")
    assert handlers() == {}
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, one, two, without]
    assert {ref: handler.where for ref, handler in handlers().items()} == {
        GroupRef("one", "t"): "hb_one.subscribers.handle",
        GroupRef("two", "t"): "hb_two.subscribers.handle",
    }
    assert len(handlers()) == 2


def test_duplicates_across_apps_name_both(app, settings):
    one = app(DECLARING.format(group="g"), "hb_one")
    two = app(DECLARING.format(group="g"), "hb_two")
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, one, two]
    with pytest.raises(SubscriberError, match=r"hb_one\.subscribers\.handle and hb_two\.subscribers\.handle"):
        handlers()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import hb_module_that_is_missing", ModuleNotFoundError),
        ("from django_mysqlqueue import subscriber\nsubscriber('t', group='a b')(len)", SubscriberError),
        ("1 / 0", ZeroDivisionError),
    ],
)
def test_an_error_in_subscribers_is_not_swallowed(app, settings, source, error):
    """A subscriber that started without its handlers would look alive and do nothing."""
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, app(source)]
    with pytest.raises(error):
        handlers()


# -- calling ------------------------------------------------------------------


@pytest.mark.parametrize("function", [coroutine_function, AsyncCallable(), Methods().coroutine])
def test_async_handlers_run_to_their_end(function):
    subscriber("t", group="g")(function)
    resolved = only()
    assert resolved.function is not function
    result = resolved.function("the delivery")
    assert not inspect.isawaitable(result)
    assert result in (None, ("awaited", "the delivery"))


def test_async_handlers_raise_through():
    @subscriber("t", group="g")
    async def failing(delivery):
        raise ValueError(delivery)

    with pytest.raises(ValueError, match="the delivery"):
        only().function("the delivery")


@pytest.mark.parametrize("function", [Callable(), Methods().plain, functools.partial(Callable())])
def test_callables_are_called_as_they_are(function):
    subscriber("t", group="g")(function)
    assert only().function("the delivery") == ("called", "the delivery")
    assert "test_registry" in only().where or "functools" in only().where


# -- registering groups -------------------------------------------------------


def test_groups_are_registered_on_the_queues_database_only(monkeypatch, settings):
    calls = []

    def register(using, ref, *, mode, start):
        calls.append((using, ref, mode, start))
        return registry.groups.Registered(ref, mode, 0, False)

    monkeypatch.setattr(registry.groups, "register", register)
    subscriber("t", group="g", mode="shared", start="latest")(handle)
    subscriber("t", group="h")(handle)
    registry.register_groups("other")
    assert calls == []
    registry.register_groups("default")
    assert calls == [
        ("default", GroupRef("g", "t"), "shared", "latest"),
        ("default", GroupRef("h", "t"), "ordered", "earliest"),
    ]
    calls.clear()
    settings.MYSQLQUEUE = {"DATABASE": "other"}
    registry.register_groups("default")
    assert calls == []
    registry.register_groups("other", only=[GroupRef("h", "t")])
    assert calls == [("other", GroupRef("h", "t"), "ordered", "earliest")]


def test_a_mode_that_differs_from_the_registered_one_is_said(monkeypatch, caplog):
    """Migrate goes on; the text says which command mends it."""
    monkeypatch.setattr(
        registry.groups, "register", lambda using, ref, **options: registry.groups.Registered(ref, "shared", 0, False)
    )
    subscriber("t", group="g")(handle)
    registry.register_groups("default")
    assert "registered as shared" in caplog.text
    assert "test_registry.handle has mode='ordered'" in caplog.text
    assert "manage.py queuegroupmode g t ordered" in caplog.text
