"""The options of the data source, checked once on the driver."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from django_mysqlqueue.pipeline.databases import Place
from django_mysqlqueue.pipeline.errors import PipelineError

Edge = int | datetime.datetime | Literal["earliest", "latest"]
"""One end of what is read: an offset, a moment, or an end of the log."""

PLACE_OPTIONS = ("defaultsFile", "defaultsGroup", "sqliteFile", "urlVariable")
SOURCE_OPTIONS = (
    "topics",
    "startOffset",
    "endOffset",
    "numPartitions",
    "maxRowsPerBatch",
    "failOnDataLoss",
    "pushFilters",
)


SPARKS_OWN = frozenset({"checkpointlocation", "queryname", "outputmode"})
"""Spark hands on what a stream's query itself was told."""


def check_known(options: Mapping[str, str], known: tuple[str, ...], what: str) -> None:
    """Refuses an option that nobody reads: a mistyped one would be ignored without a word."""
    names = {name.lower() for name in known} | SPARKS_OWN
    for name in options:
        if name.lower() not in names:
            raise PipelineError(f"option {name!r}: {what} knows {', '.join(known)}")


def number(options: Mapping[str, str], name: str, *, most: int) -> int | None:
    """A whole number from 1 to ``most``."""
    if name not in options:
        return None
    text = options[name]
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise PipelineError(f"option {name}={text!r}: must be a whole number from 1 to {most}")
    return int(text)


def flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise PipelineError(f"option {name}={options[name]!r}: must be true or false")
    return text == "true"


def parse_edge(name: str, text: str) -> Edge:
    """An offset, a time in ISO 8601 (UTC unless it says otherwise), ``earliest`` or ``latest``.

    Raises:
        PipelineError: naming the value and the rule.
    """
    if text in ("earliest", "latest"):
        return text  # type: ignore[return-value]
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise PipelineError(
            f"{name}={text!r}: must be 'earliest', 'latest', an offset or a time like 2026-11-22T06:00:00Z"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


def parse_topics(text: str) -> tuple[str, ...]:
    """Topics by commas; one that has a comma itself in a JSON list."""
    if not text.startswith("["):
        return tuple(dict.fromkeys(topic.strip() for topic in text.split(",")))
    try:
        topics = json.loads(text)
    except ValueError:
        topics = None
    if not isinstance(topics, list) or not topics or not all(isinstance(topic, str) for topic in topics):
        raise PipelineError(f"option topics={text!r}: must be names by commas or a JSON list of them, at least one")
    return tuple(dict.fromkeys(topics))


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a reader was asked for."""

    place: Place
    topics: tuple[str, ...] | None = None
    start: Edge = "earliest"
    end: Edge = "latest"
    num_partitions: int | None = None
    max_rows_per_batch: int | None = None
    fail_on_data_loss: bool = True
    push_filters: bool = False

    ROWS_PER_PARTITION: ClassVar[int] = 250_000
    MOST_PARTITIONS: ClassVar[int] = 200
    """Without ``numPartitions``: one task for so many offsets, up to so many tasks."""

    @property
    def wanted(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return () if self.topics is None else (("topic", self.topics),)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SourceOptions:
        """Raises ``PipelineError``, naming the option, its value and the rule."""
        place = Place.of(options)
        check_known(options, SOURCE_OPTIONS + PLACE_OPTIONS, "the source")
        end = parse_edge("endOffset", options.get("endOffset", "latest"))
        if end == "earliest":
            raise PipelineError("option endOffset='earliest': nothing comes before it")
        return cls(
            place=place,
            topics=parse_topics(options["topics"]) if "topics" in options else None,
            start=parse_edge("startOffset", options.get("startOffset", "earliest")),
            end=end,
            num_partitions=number(options, "numPartitions", most=100_000),
            max_rows_per_batch=number(options, "maxRowsPerBatch", most=2**62),
            fail_on_data_loss=flag(options, "failOnDataLoss", default=True),
            push_filters=flag(options, "pushFilters", default=False),
        )
