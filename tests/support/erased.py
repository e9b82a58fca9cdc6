"""A key with messages everywhere, and where its texts are found."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from django.db import connections

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import MODELS, OutboxMessage, Slots
from tests.support.factories import QuarantinedMessageFactory
from tests.support.harness import USING, Sub, handler, sequence

KEY, SECRET, OTHER = "eva-4711", "sécret of her", "otto"
LATER = datetime.timedelta(days=1)


def fail(delivery: Any) -> None:
    raise ValueError(f"cannot handle {delivery.payload}")


def wait(delivery: Any) -> None:
    delivery.nack(delay=3600, reason=f"not yet: {delivery.payload}")


def everywhere(topic: str = "t") -> None:
    """Messages of two keys: settled, failed, dead-lettered, waiting, scheduled, debounced, and in the quarantine."""
    for key, text in ((KEY, SECRET), (OTHER, "harmless")):
        for priority in (0, 10):
            publish_many(topic, [Message({"text": text, "n": n}, key=key, priority=priority) for n in range(3)])
            publish(topic, {"text": text}, key=key, priority=priority, coalesce=f"about {key}")
    sequence()
    sub = Sub(
        handler(group="reads", topic=topic),
        handler(group="fails", topic=topic, function=fail, max_attempts=1),
        handler(group="waits", topic=topic, function=wait, mode="shared"),
    )
    sub.settle()
    sub.leave()
    sequence()
    for key, text in ((KEY, SECRET), (OTHER, "harmless")):
        publish(topic, {"text": text}, key=key, delay=LATER)
        publish(topic, {"text": text}, key=key, delay=LATER, coalesce=f"later {key}")
        publish(topic, {"text": text}, key=key)
        last = OutboxMessage.objects.filter(topic=topic).latest("outbox_id")
        place = {"partition_key": last.partition_key, "publisher_key": last.publisher_key}
        QuarantinedMessageFactory(topic=topic, payload=text.encode(), **place)
    slots = {"consumer_group": "reads", "topic": topic, "limit_key": f":{KEY}", "subscriber_name": ""}
    Slots.objects.get_or_create(**slots, defaults={"full_at": 1})


def rows() -> Iterator[tuple[str, str]]:
    """Every row of every table, as text."""
    for model in MODELS:
        names = [field.column for field in model._meta.concrete_fields]
        quoted = ", ".join(f"`{name}`" for name in names)
        with connections[USING].cursor() as cursor:
            cursor.execute(f"SELECT {quoted} FROM {model._meta.db_table}")
            for row in cursor.fetchall():
                texts = [one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in row]
                yield model.__name__, "\n".join(texts)


def has(text: str, *words: str) -> bool:
    """Whether a text has a word, as it is or in JSON."""
    return any(word in text or json.dumps(word)[1:-1] in text for word in words)


def tables_with(*words: str) -> set[str]:
    return {name for name, text in rows() if has(text, *words)}


def others() -> list[tuple[str, str]]:
    """The rows of the other key."""
    return sorted((name, text) for name, text in rows() if has(text, OTHER, "harmless"))


def files_with(root: Path, *words: str) -> list[Path]:
    """The files of an archive that have a word, when they are decoded."""
    found = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        if path.suffix == ".parquet":
            file = pq.ParquetFile(path)
            text = str(file.metadata) + "\n".join(
                str(value.decode(errors="replace") if isinstance(value, bytes) else value)
                for batch in file.iter_batches()
                for row in batch.to_pylist()
                for value in row.values()
            )
            text += "\n".join(
                str(file.metadata.row_group(group).column(column).statistics)
                for group in range(file.num_row_groups)
                for column in range(file.metadata.num_columns)
            )
        else:
            text = path.read_bytes().decode(errors="replace")
        if has(text, *words):
            found.append(path)
    return found
