"""Topics without a consumer group."""

from __future__ import annotations

import io

from django.core.management import call_command

from django_mysqlqueue import Message, publish_many
from django_mysqlqueue.inspection import PAGES, Bounds, Problem, find_problems
from django_mysqlqueue.models import QueueMessage
from tests.support.harness import USING, sequence
from tests.support.internals import GroupRef, groups

TYPO = "orders.plced"


def send(count: int = 1, topic: str = TYPO) -> None:
    publish_many(topic, (Message(number, key=f"k{number}") for number in range(count)))
    sequence()


def register(topic: str = TYPO) -> None:
    groups.register(USING, GroupRef("g", topic), mode="ordered", start="earliest")


def in_log(topic: str = TYPO) -> int:
    return QueueMessage.objects.filter(topic=topic).count()


def command(name: str, *arguments: str) -> str:
    output = io.StringIO()
    call_command(name, *arguments, stdout=output, no_color=True)
    return output.getvalue()


def found(bounds: Bounds = PAGES) -> list[Problem]:
    everything = find_problems(using=USING, bounds=bounds)
    return [one for one in everything if one.kind == "groupless"]


def texts(bounds: Bounds = PAGES) -> list[str]:
    return [one.text for one in found(bounds)]
