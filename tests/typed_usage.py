"""How a typed project uses the package; mypy reads it. An ignore that is not needed is an error there."""

from __future__ import annotations

from django_mysqlqueue import (
    Delivery,
    Message,
    acancel,
    apublish,
    cancel,
    publish,
    publish_many,
    reschedule,
    subscriber,
)
from django_mysqlqueue.testing import deliver_all, delivery, enqueued, job_context, published

intervals: dict[str, int] = {"initial": 1}


@subscriber("t", group="one", max_attempts=None, backoff=intervals)
def one(delivery: Delivery) -> None:
    delivery.nack(5, reason="later")


@subscriber("t", group="many", batch=True, batch_size=10, atomic=True)
def many(deliveries: list[Delivery]) -> int:
    return len(deliveries)


@subscriber("t", group="async", timeout=5)
async def waits(delivery: Delivery) -> None:
    delivery.ack()


@subscriber("t", group="rules", reject_on=KeyError, retry_on=(OSError, TimeoutError))
def rules(delivery: Delivery) -> None:
    limit: int | None = delivery.max_attempts
    print(limit, delivery.is_last_attempt)


@subscriber("t", group="wrong class", reject_on=SystemExit)  # type: ignore[arg-type]
def wrong_class(delivery: Delivery) -> None: ...


@subscriber("t", group="wrong", batch=True)  # type: ignore[type-var]
def single(delivery: Delivery) -> None: ...


@subscriber("t", group="wrong too")  # type: ignore[type-var]
def several(deliveries: list[Delivery]) -> None: ...


@subscriber("t", group="two")  # type: ignore[type-var]
def two(delivery: Delivery, more: int) -> None: ...


@subscriber("t", group="no such option", max_attempt=3)  # type: ignore[call-overload, untyped-decorator]
def unknown_option(delivery: Delivery) -> None: ...


@subscriber("t", group="no batch", batch_size=3)  # type: ignore[call-overload, untyped-decorator]
def size_without_batch(delivery: Delivery) -> None: ...


def use() -> None:
    message_id: str = publish("t", {"n": 1}, key="k", on_mismatch="on_commit")
    count: int = publish_many("t", [Message(1), {"n": 2}])
    changed: int = cancel(message_id, topic="t", key="k") + reschedule(message_id, topic="t", delay=count)
    print(changed)
    one(delivery({"n": 1}, key="k", id=message_id, attempt=count))
    size: int = many([delivery()])
    print(published("t")[0].payload, deliver_all(advance=3600)[size].outcome)
    print(enqueued()[0].task.call(job_context(enqueued()[0].task, attempt=size).reports[0].done))
    publish("t", 1, on_mismatch="never")  # type: ignore[arg-type]


async def use_from_async_code() -> None:
    message_id: str = await apublish("t", {"n": 1}, key="k", on_mismatch="on_commit")
    changed: int = await acancel(message_id, topic="t")
    print(changed)
    await apublish("t", {"n": 1}, no_such_argument=1)  # type: ignore[call-arg]
    await acancel(message_id, topic=1)  # type: ignore[arg-type]
