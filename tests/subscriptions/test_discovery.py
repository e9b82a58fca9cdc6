"""How handlers are found, and whose they are."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import textwrap
import types

import pytest
from django.test import override_settings

from django_mysqlqueue import SubscriberError, subscriber
from tests.support import job_worlds
from tests.support.internals import GroupRef, handlers
from tests.support.registered import AsyncCallable, Methods, coroutine_function, handle, only

pytestmark = pytest.mark.any_engine


class Callable:
    def __call__(self, delivery):
        return "called", delivery


def another(delivery):
    return None


# -- duplicates ---------------------------------------------------------------


def test_two_handlers_for_one_group_and_topic_are_refused_at_start_up():
    subscriber("t", group="g")(handle)
    subscriber("t", group="g")(another)
    with pytest.raises(SubscriberError) as raised:
        handlers()
    text = str(raised.value)
    assert "registered.handle" in text
    assert "test_discovery.another" in text
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


# -- discovery ----------------------------------------------------------------


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


def test_job_handlers_are_found_once_after_the_installed_apps_were_overridden(settings):
    settings.TASKS = job_worlds.TASKS
    found = handlers()
    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS]):
        assert handlers().keys() == found.keys()
    assert handlers().keys() == found.keys() != set()


# -- calling ------------------------------------------------------------------


@pytest.mark.parametrize("function", [coroutine_function, AsyncCallable(), Methods().coroutine])
def test_async_handlers_run_to_their_end(function):
    subscriber("t", group="g")(function)
    resolved = only()
    assert resolved.is_async
    result = resolved.call("the delivery")
    assert not inspect.isawaitable(result)
    assert result in (None, ("awaited", "the delivery"))


def test_async_handlers_raise_through():
    @subscriber("t", group="g")
    async def failing(delivery):
        raise ValueError(delivery)

    with pytest.raises(ValueError, match="the delivery"):
        only().call("the delivery")


@pytest.mark.parametrize("function", [Callable(), Methods().plain, functools.partial(Callable())])
def test_callables_are_called_as_they_are(function):
    subscriber("t", group="g")(function)
    assert only().call("the delivery") == ("called", "the delivery")
    assert "tests." in only().where or "functools" in only().where


# -- registering groups -------------------------------------------------------
