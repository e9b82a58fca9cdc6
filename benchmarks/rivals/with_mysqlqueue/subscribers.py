from __future__ import annotations

from django.db.models import F

from django_mysqlqueue import Delivery, subscriber
from with_mysqlqueue.models import Account


@subscriber("noop", group="bench")
def noop(delivery: Delivery) -> None:
    pass


@subscriber("atomic", group="bench", atomic=True)
def atomic(delivery: Delivery) -> None:
    pass


@subscriber("update", group="bench", atomic=True)
def update(delivery: Delivery) -> None:
    Account.objects.filter(pk=delivery.payload["n"] + 1).update(balance=F("balance") + 1)


@subscriber("batch", group="bench", atomic=True, batch=True, batch_size=500)
def batch(deliveries: list[Delivery]) -> None:
    pass
