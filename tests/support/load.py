"""A process that publishes a fixed load in every way there is, and notes what it has committed.

    python -m tests.support.load NAME COUNT

Each unit goes to all topics of ``tests.app.subscribers`` that its groups read
in order, shared, strictly and in batches. What is noted has been committed; a
number from ``ROLLED_BACK`` on never was.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import django
from django.db import transaction

TOPICS = ("p.plain", "p.shared", "p.strict", "p.batch")
KEYS = 4
ROLLED_BACK = 1_000_000
MANY = 1_000
"""Numbers of one ``publish_many`` are so far apart."""
LATER = "later"
"""Keys of scheduled messages, which take their place in the order when they come due."""
TEXT = "it's \"so\" \\ % _ ü 😀 \x00 ''"
LARGE = 300_000
"""Characters of one message: two fit into a packet of a megabyte."""


METADATA = {"text": TEXT, "empty": ""}


def payload(number: int) -> dict[str, object]:
    return {"n": number, "text": TEXT if number % MANY != 8 else "x" * LARGE}


def note(key: str, *numbers: int) -> None:
    from tests.app.models import Effect

    Effect.objects.bulk_create(Effect(name=f"committed|{key}|0", value=number) for number in numbers)


def everywhere(number: int, key: str, **options: Any) -> None:
    from django_mysqlqueue import publish

    for topic in TOPICS:
        publish(topic, payload(number), key=key, metadata=METADATA, **options)


def alone(number: int, key: str) -> None:
    everywhere(number, key)
    note(key, number)


def in_a_transaction(number: int, key: str) -> None:
    with transaction.atomic():
        everywhere(number, key)
        rolled_back(number, key)
        note(key, number)


def rolled_back(number: int, key: str) -> None:
    with contextlib.suppress(ZeroDivisionError), transaction.atomic():
        everywhere(number + ROLLED_BACK, key)
        raise ZeroDivisionError


def scheduled(number: int, key: str) -> None:
    key += LATER
    with transaction.atomic():
        everywhere(number, key, delay=0.3)
        note(key, number)


def many(number: int, key: str) -> None:
    from django_mysqlqueue import Message, publish_many

    key += "m"
    numbers = [number + more * MANY for more in range(3)]
    for topic in TOPICS:
        publish_many(topic, [Message(payload(one), key=key, metadata=METADATA) for one in numbers])
    note(key, *numbers)


WAYS = (alone, in_a_transaction, rolled_back, scheduled, many)


def main(name: str, count: int) -> None:
    django.setup()
    for number in range(count):
        WAYS[number % len(WAYS)](number, f"{name}ü{number % KEYS}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
