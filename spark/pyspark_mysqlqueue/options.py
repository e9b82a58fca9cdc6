"""The options of the data source. The driver checks them once."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError

Edge = int | datetime.datetime | Literal["earliest", "latest"]
"""One end of a range: an offset, a time, or an end of the log."""

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
"""Options of a streaming query, in lower case. Spark passes them to the data source too."""


def check_known(options: Mapping[str, str], known: tuple[str, ...], what: str) -> None:
    """Check that all options are known. A mistyped one would be ignored silently.

    Args:
        options: The options.
        known: The names that are allowed, in any case.
        what: The component that takes the options, for the error.

    Raises:
        PipelineError: An option is unknown.
    """
    names = {name.lower() for name in known} | SPARKS_OWN
    for name in options:
        if name.lower() not in names:
            raise PipelineError(f"unknown option {name!r}: {what} accepts {', '.join(known)}")


def number(options: Mapping[str, str], name: str, *, most: int) -> int | None:
    """Return an option that must be a whole number from 1 to ``most``, or None if it is not given.

    Raises:
        PipelineError: The value is not such a number.
    """
    if name not in options:
        return None
    text = options[name]
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        raise PipelineError(f"option {name}={text!r}: must be a whole number from 1 to {most}")
    return int(text)


def flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Return an option that must be ``true`` or ``false``.

    Raises:
        PipelineError: The value is neither.
    """
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise PipelineError(f"option {name}={options[name]!r}: must be true or false")
    return text == "true"


def parse_edge(name: str, text: str) -> Edge:
    """Parse an offset, a time in ISO 8601 (in UTC if it has no UTC offset), ``earliest`` or ``latest``.

    Raises:
        PipelineError: The text is none of these.
    """
    if text in ("earliest", "latest"):
        return text  # type: ignore[return-value]
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return parse_time(text)
    except ValueError:
        raise PipelineError(
            f"{name}={text!r}: must be 'earliest', 'latest', an offset or a time such as 2026-11-22T06:00:00Z"
        ) from None


def parse_time(text: str) -> datetime.datetime:
    """Parse a time in ISO 8601 (in UTC if it has no UTC offset).

    Raises:
        ValueError: The text is not a time.
    """
    # Python 3.10 does not know the Z.
    moment = datetime.datetime.fromisoformat(f"{text[:-1]}+00:00" if text.endswith("Z") else text)
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.timezone.utc)


def parse_topics(text: str) -> tuple[str, ...]:
    """Parse topics: names separated by commas, or a JSON list, which a name with a comma needs.

    Raises:
        PipelineError: The text begins with ``[`` and is not a JSON list of at least one name.
    """
    if not text.startswith("["):
        return tuple(dict.fromkeys(topic.strip() for topic in text.split(",")))
    try:
        topics = json.loads(text)
    except ValueError:
        topics = None
    if not isinstance(topics, list) or not topics or not all(isinstance(topic, str) for topic in topics):
        raise PipelineError(
            f"option topics={text!r}: must be topics separated by commas, or a JSON list of at least one topic"
        )
    return tuple(dict.fromkeys(topics))


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The parsed options of a reader."""

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
    """Offsets per task, and the maximum number of tasks, unless ``numPartitions`` is given."""

    @property
    def wanted(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The condition on topics, in the form of ``reading.Query.wanted``."""
        return () if self.topics is None else (("topic", self.topics),)

    @classmethod
    def of(cls, options: Mapping[str, str]) -> SourceOptions:
        """Parse and check the options of a reader.

        Raises:
            PipelineError: An option is unknown or has an invalid value.
        """
        place = Place.of(options)
        check_known(options, SOURCE_OPTIONS + PLACE_OPTIONS, "the source")
        end = parse_edge("endOffset", options.get("endOffset", "latest"))
        if end == "earliest":
            raise PipelineError("option endOffset='earliest': the range would be empty")
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
