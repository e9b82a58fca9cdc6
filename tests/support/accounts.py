"""What was committed and what came of it, by the table that publishers and handlers write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from django_mysqlqueue.inspection import get_overview
from django_mysqlqueue.models import DeliveryState, OutboxMessage, PartitionLease, QueueMessage
from tests.app.models import Effect

GROUPS = ("plain", "atomic", "shared")


def effects(name: str, using: str = "default") -> list[tuple[str, int]]:
    """(key, number) of each effect of a group, in the order of their commits; ``committed`` is the publishers'."""
    rows = Effect.objects.using(using).filter(name__startswith=f"{name}|").order_by("id")
    return [(row.split("|")[1], number) for row, number in rows.values_list("name", "value")]


def count(name: str, using: str = "default") -> int:
    return Effect.objects.using(using).filter(name__startswith=f"{name}|").count()


def is_drained(using: str = "default") -> bool:
    """Nothing is on its way, and leases that linger have gone."""
    if OutboxMessage.objects.using(using).exists() or PartitionLease.objects.using(using).exists():
        return False
    return all(not one.lag for one in get_overview(using=using, lease_duration=3).groups if one.ref.group in GROUPS)


def assert_balanced(using: str = "default", *, ordered: Sequence[str] = ("plain", "atomic")) -> None:
    """Every group has handled what was committed and nothing else, the atomic one exactly once; nothing is left."""
    committed = effects("committed", using)
    expected = set(committed)
    assert len(expected) == len(committed) > 50
    for group in GROUPS:
        assert set(effects(group, using)) == expected, group
    assert Counter(effects("atomic", using)) == Counter(expected)
    for group in ordered:
        starts = list(dict.fromkeys(effects(group, using)))
        for key in {key for key, _ in starts}:
            numbers = [number for other, number in starts if other == key]
            assert numbers == sorted(numbers), (group, key)
    assert not QueueMessage.objects.using(using).filter(topic__endswith="_dlq").exists()
    for model in (OutboxMessage, DeliveryState, PartitionLease):
        assert not model.objects.using(using).exists(), model
