from __future__ import annotations

import record

from django_mysqlqueue import Delivery, subscriber


@subscriber("noop", group="bench")
def noop(delivery: Delivery) -> None:
    record.ran(delivery.payload)
