"""The handlers, one for each way of consuming. What they do with a message, its name decides."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from django.db import connection

from django_mysqlqueue import Delivery, subscriber
from soak import plan, records
from soak.app import traps

FOLDER = Path(os.environ["SOAK_FOLDER"])


class Planned(Exception):
    """A failure that the plan asked for."""


def note(verb: str, deliveries: Sequence[Delivery]) -> None:
    """One write for all of them."""
    if deliveries:
        records.write(
            records.group_file(FOLDER, deliveries[0].group),
            [records.Step(verb, one.id, one.key or "", one.offset, one.attempt) for one in deliveries],
        )


def act(delivery: Delivery) -> None:
    """Does with a message what is meant for it, and says how it ended."""
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
def simple(delivery: Delivery) -> None:
    note(records.STARTED, [delivery])
    act(delivery)


# An effect is a row that nothing keeps from being there twice.
INSERT_EFFECT = "INSERT INTO soak_effects (consumer_group, message_id) VALUES "


def effect(deliveries: Sequence[Delivery]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            INSERT_EFFECT + ", ".join(["(%s, %s)"] * len(deliveries)),
            [value for one in deliveries for value in (one.group, one.id)],
        )


@subscriber(plan.TOPIC, group="atomic", atomic=True)
def atomic(delivery: Delivery) -> None:
    note(records.STARTED, [delivery])
    effect([delivery])
    traps.come_by("atomic")
    act(delivery)


@subscriber(plan.TOPIC, group="batch", atomic=True, batch=True, batch_size=20)
def batch(deliveries: list[Delivery]) -> None:
    note(records.STARTED, deliveries)
    kept = [one for one in deliveries if one.attempt > 1 or plan.fate("batch", one.id) != plan.PUT_OFF]
    if kept:
        effect(kept)
    for delivery in deliveries:
        act(delivery)
