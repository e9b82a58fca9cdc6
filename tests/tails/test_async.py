"""``atail``: the same for event loops."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from asgiref.sync import async_to_sync, sync_to_async

from django_mysqlqueue import InvalidMessage, Message, publish_many
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.tails import Gap, ReceivedMessage, atail, following
from tests.support.harness import USING, sequence


def send(*payloads, topic="t"):
    publish_many(topic, (Message(payload, key="k") for payload in payloads))
    sequence()


def run(coroutine):
    return async_to_sync(coroutine)()


def test_it_reads_to_the_end_and_the_newest(db):
    send(*range(20))

    async def read():
        return [[one.payload async for one in atail("t", **options)] for options in ({"offset": 0}, {}, {"limit": 2})]

    assert run(read) == [list(range(20)), list(range(10, 20)), [18, 19]]


def test_it_follows(db):
    async def follow():
        found = []
        async with atail("t", follow=True, limit=3) as follower:
            await sync_to_async(send)(1, 2)
            async for one in follower:
                found.append(one.payload)
                if one.payload == 2:
                    await sync_to_async(send)(3)
        return found

    assert run(follow) == [1, 2, 3]


@pytest.mark.parametrize("follow", [True, False])
def test_it_says_that_the_log_has_lost_its_end(db, follow):
    send(1)
    end = QueueMessage.objects.get().offset

    async def read():
        async with atail("t", offset=end + 3, follow=follow) as reader:
            return await anext(reader), reader.position

    assert run(read) == (Gap("t", end, end + 2, truncated=True), end)


@pytest.mark.promise("Tails")
def test_many_tasks_of_one_loop_follow_together(db, hubs):
    async def follow():
        async def one(key):
            async with atail("t", follow=True, limit=5) as follower:
                ready.append(key)
                return [each.payload async for each in follower]

        ready: list[int] = []
        tasks = [asyncio.create_task(one(number)) for number in range(50)]
        while len(ready) < 50:
            await asyncio.sleep(0.01)
        for number in range(5):
            await sync_to_async(send)(number)
        return await asyncio.gather(*tasks)

    assert run(follow) == [list(range(5))] * 50
    assert sum("payload" in sql for sql in hubs.sent) <= 5


def test_waiting_ends_at_the_timeout_and_by_cancelling(db):
    async def follow():
        async with atail("t", follow=True) as follower:
            assert not await follower.wait(0.05)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(follower)
            await sync_to_async(send)(1)
            assert await follower.wait(20)
            assert (await anext(follower)).payload == 1, "nothing was lost by that"
        with pytest.raises(StopAsyncIteration):
            await anext(follower)

    run(follow)
    thread = following.hub_of(USING)._thread
    if thread is not None:
        thread.join(20)
    assert not following.hub_of(USING)._windows


def test_another_task_closes_it(db):
    async def follow():
        follower = atail("t", follow=True)
        await follower.start()
        asyncio.get_running_loop().call_later(0.05, follower.close)
        return [one async for one in follower]

    assert run(follow) == []


def test_two_tasks_that_start_it_join_once(db):
    async def follow():
        follower = atail("t", follow=True)
        await asyncio.gather(follower.start(), follower.start(), follower.wait(0))
        (window,) = following.hub_of(USING)._windows.values()
        assert len(window.followers) == 1
        follower.close()

    run(follow)


def test_one_that_was_closed_before_it_began_does_not_begin(db):
    async def follow():
        follower = atail("t", follow=True)
        follower.close()
        assert not await follower.wait(None)
        assert [one async for one in follower] == []

    run(follow)
    assert following.hub_of(USING)._thread is None


def test_waiting_for_one_that_does_not_follow_reads_it(db):
    send(1)

    async def read():
        reader = atail("t", offset=0)
        assert await reader.wait(None)
        assert (await anext(reader)).payload == 1
        assert not await reader.wait(None)

    run(read)


def test_a_loop_that_ended_does_not_disturb_the_others(db):
    """Its follower was neither closed nor collected."""
    kept = []

    async def leave_open():
        follower = atail("t", follow=True)
        await follower.start()
        kept.append(follower)

    run(leave_open)

    async def follow():
        async with contextlib.aclosing(atail("t", follow=True)) as follower:
            await follower.start()
            await sync_to_async(send)(1)
            return await anext(follower)

    one = run(follow)
    assert isinstance(one, ReceivedMessage)
    kept[0].close()


def test_arguments_are_checked_at_the_call(db):
    with pytest.raises(InvalidMessage, match="limit 0"):
        atail("t", limit=0)
