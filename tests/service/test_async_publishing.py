"""Publishing from async code."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connection, transaction

from django_mysqlqueue import (
    InvalidMessage,
    Message,
    apublish,
    apublish_many,
    cancel,
    publish,
    publish_many,
    reschedule,
)
from django_mysqlqueue.models import OutboxMessage
from tests.app.models import Effect
from tests.support.harness import in_thread

pytestmark = pytest.mark.usefixtures("no_handlers")


def parameters_of(function):
    return inspect.signature(function).parameters


def stored():
    return sorted(OutboxMessage.objects.values_list("topic", "partition_key", "message_id"))


@pytest.mark.parametrize(("one", "other"), [(publish, apublish), (publish_many, apublish_many)])
def test_the_same_arguments(one, other):
    assert parameters_of(one).keys() == parameters_of(other).keys()
    for name, parameter in parameters_of(one).items():
        assert parameter.default == parameters_of(other)[name].default
    assert inspect.iscoroutinefunction(other)


def test_apublish(db):
    assert async_to_sync(apublish)("t", {"n": 1}, key="k", id="one") == "one"
    assert async_to_sync(apublish_many)("t", [Message(1, key="k", id="two"), Message(2, key="k", id="three")]) == 2
    assert stored() == [("t", "k", "one"), ("t", "k", "three"), ("t", "k", "two")]


def test_apublish_many_takes_an_async_iterable(db):
    async def messages():
        for number in range(3):
            await asyncio.sleep(0)
            yield Message(number, key="k", id=str(number))

    assert async_to_sync(apublish_many)("t", messages()) == 3
    assert [message_id for _, _, message_id in stored()] == ["0", "1", "2"]


def test_apublish_refuses_what_publish_refuses(db):
    with pytest.raises(InvalidMessage, match="topic 'a b'"):
        async_to_sync(apublish)("a b", 1)
    with pytest.raises(InvalidMessage, match="message 1"):
        async_to_sync(apublish_many)("t", [1, object()])
    assert stored() == []


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda: publish("t", 1), "apublish"),
        (lambda: publish_many("t", [1]), "apublish_many"),
        (lambda: publish("t", 1, coalesce="c", delay=60), "apublish"),
        (lambda: cancel("one", topic="t"), "acancel"),
        (lambda: reschedule("one", topic="t", delay=60), "areschedule"),
    ],
)
def test_a_call_from_async_code_names_the_function_to_await(db, call, instead):
    async def coroutine():
        call()

    with pytest.raises(SynchronousOnlyOperation, match=rf"^\w+\(\) cannot be .* use “await {instead}\(…\)”\.$"):
        asyncio.run(coroutine())
    assert stored() == []


def test_it_joins_no_transaction_of_async_code(db):
    """Each commits by itself: what fails after it does not take it back."""

    async def work():
        await apublish("t", 1, key="k", id="kept")
        raise ValueError("after it")

    def run():  # as a server does: the loop is outermost
        with pytest.raises(ValueError, match="after it"):
            asyncio.run(work())
        asyncio.run(sync_to_async(lambda: connection.close())())  # that of asgiref's thread

    in_thread(run)
    assert stored() == [("t", "k", "kept")]


def test_one_sync_function_publishes_with_its_data(db):
    @sync_to_async
    def place():
        with transaction.atomic():
            Effect.objects.create(name="order")
            publish("t", 1)
            raise ValueError("both or neither")

    with pytest.raises(ValueError, match="both or neither"):
        async_to_sync(place)()
    assert stored() == []
    assert not Effect.objects.exists()
