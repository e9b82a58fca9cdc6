"""The handlers, one for each way of consuming. The message id decides what a handler does with a message."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from django.db import connections

from django_mysqlqueue import Delivery, recurring_message, subscriber
from django_mysqlqueue.names.keys import lane
from soak import plan, records, schedule_plan
from soak.app import traps

FOLDER = Path(os.environ["SOAK_FOLDER"])


class Planned(Exception):
    """A planned failure."""


def note(verb: str, deliveries: Sequence[Delivery]) -> None:
    """Record the same step for all deliveries, with one write."""
    if deliveries:
        at, me = records.now(), records.me()
        records.write(
            records.group_file(FOLDER, deliveries[0].group),
            [
                records.Step(
                    verb,
                    one.id,
                    lane(one.key or "", one.priority),
                    plan.place(one._using, one.offset),
                    one.attempt,
                    at,
                    me,
                )
                for one in deliveries
            ],
        )


@contextlib.contextmanager
def called(*deliveries: Delivery) -> Iterator[None]:
    """Record that the handler starts, and whether it raises an exception."""
    note(records.STARTED, deliveries)
    try:
        yield
    except BaseException:
        note(records.LEFT, deliveries)
        raise


def act(delivery: Delivery) -> None:
    """Do what the plan says for a message, and record the outcome."""
    time.sleep(duration(delivery))
    end(delivery)


def duration(delivery: Delivery) -> float:
    """Return for how many seconds the handler works on a message."""
    slow, long = (is_such(delivery.group, delivery.id) for is_such in (plan.is_slow, plan.is_long))
    return plan.SLOW * slow + plan.LONG * long


def end(delivery: Delivery) -> None:
    """End the call of a message as planned, and record the outcome."""
    inside = delivery.payload if isinstance(delivery.payload, dict) else {}
    if inside.get(plan.NAME_INSIDE) != delivery.id:
        note(records.WRONG, [delivery])
    elif plan.REPEAT in inside:
        note(records.AGAIN, [delivery])
    match plan.fate(delivery.group, delivery.id):
        case plan.POISON:
            note(records.FAILED, [delivery])
            raise Planned("poison")
        case plan.REJECT:
            note(records.REJECTED, [delivery])
            delivery.reject("as planned")
        case plan.FLAKY if delivery.attempt == 1:
            note(records.FAILED, [delivery])
            raise Planned("the first attempt")
        case plan.PUT_OFF if delivery.attempt == 1:
            note(records.FAILED, [delivery])
            delivery.nack(0.3, "as planned")
        case _:
            note(records.DONE, [delivery])


@subscriber(plan.TOPIC, group="skip")
@subscriber(plan.TOPIC, group="strict", on_failure="block")
@subscriber(plan.TOPIC, group="shared", mode="shared")
@subscriber(plan.TOPIC, group="filtered", filter={"region": ["eu", "us"]})
@subscriber(plan.TOPIC, group="narrowed", filter={"region": ["eu", "us"]})
@subscriber(plan.TOPIC, group=plan.LIMITED, rate_per_key=plan.RATE_PER_KEY, burst=plan.BURST)
@subscriber(plan.RELAYED, group="relayed")
@subscriber(plan.MOVED, group="moved", on_failure="block")
@subscriber(plan.SQL, group="sql-ordered")
def simple(delivery: Delivery) -> None:
    with called(delivery):
        act(delivery)


@subscriber(plan.TOPIC, group="async")
@subscriber(plan.TOPIC, group="async-shared", mode="shared", concurrency=20)
async def waiting(delivery: Delivery) -> None:
    with called(delivery):
        await asyncio.sleep(duration(delivery))
        end(delivery)


# An effect is a row. No constraint prevents a second one.
INSERT_EFFECT = "INSERT INTO soak_effects (consumer_group, message_id) VALUES "


def effect(deliveries: Sequence[Delivery]) -> None:
    with connections[deliveries[0]._using].cursor() as cursor:
        cursor.execute(
            INSERT_EFFECT + ", ".join(["(%s, %s)"] * len(deliveries)),
            [value for one in deliveries for value in (one.group, one.id)],
        )


@subscriber(plan.TOPIC, group="atomic", atomic=True)
@subscriber(plan.RELAYED, group="relayed-atomic", atomic=True)
@subscriber(plan.MOVED, group="moved-atomic", atomic=True)
@subscriber(plan.SQL, group="sql-shared", mode="shared", atomic=True)
def atomic(delivery: Delivery) -> None:
    with called(delivery):
        effect([delivery])
        traps.come_by("atomic")
        act(delivery)


@subscriber(plan.TOPIC, group="batch", atomic=True, batch=True, batch_size=20)
def batch(deliveries: list[Delivery]) -> None:
    with called(*deliveries):
        kept = [one for one in deliveries if one.attempt > 1 or plan.fate("batch", one.id) != plan.PUT_OFF]
        if kept:
            effect(kept)
        for delivery in deliveries:
            act(delivery)


@subscriber(schedule_plan.TOPIC, group=schedule_plan.GROUP)
@subscriber(schedule_plan.AWAY, group=schedule_plan.GROUP)
def ticked(delivery: Delivery) -> None:
    with called(delivery):
        note(records.DONE, [delivery])


for one in (schedule_plan.EVERY_MESSAGE, schedule_plan.NEWEST_MESSAGE):
    recurring_message(one.name, topic=one.topic, payload=None, every=one.every, catch_up=one.catch_up)
