"""The options of the data source. The driver checks them once."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import InvalidMessage, PipelineError
from pyspark_mysqlqueue.shared.rules import check_name
from pyspark_mysqlqueue.shared.sizes import LATEST_DELIVERY
from pyspark_mysqlqueue.shared.tables import ARCHIVE

Edge = int | datetime.datetime | Literal["earliest", "latest"]
"""One end of a range: an offset, a time, or an end of the log."""
Edges = Edge | tuple[tuple[str, Edge], ...]
"""One end of what a source reads: one for all topics, or one for each topic."""

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
PLACE_OPTIONS = ("defaultsFile", "defaultsGroup", "sqliteFile", "urlVariable")
SOURCE_OPTIONS = (
    "subscribe",
    "subscribePattern",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "columns",
    "includeHeaders",
    "pushFilters",
    "reader",
)
EVERY_TOPIC = ".*"
NAMED: Mapping[int, Literal["earliest", "latest"]] = {-2: "earliest", -1: "latest"}
"""The numbers that Kafka's JSON has for the ends of the log."""

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
            f"option subscribe={text!r}: must be topics separated by commas, or a JSON list of at least one topic"
        )
    return tuple(dict.fromkeys(topics))


def _reader_name(options: Mapping[str, str], *, is_stream: bool) -> str:
    if "reader" not in options:
        return ""
    if not is_stream or options["reader"] == ARCHIVE:
        why = "only streams can be registered readers" if not is_stream else "the archive has this name"
        raise PipelineError(f"option reader={options['reader']!r}: {why}")
    try:
        return check_name("option reader", options["reader"])
    except InvalidMessage as error:
        raise PipelineError(str(error)) from None


def _parse_pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise PipelineError(f"option subscribePattern={text!r}: is not a regular expression: {error}") from error
    return text


def _edges(
    options: Mapping[str, str], side: Literal["starting", "ending"], default: Edge, topics: tuple[str, ...] | None
) -> Edges:
    """Parse ``startingTimestamp``, else ``startingOffsets``, or the same options of the end."""
    moment = number(options, f"{side}Timestamp", most=LATEST_DELIVERY)
    if moment is not None:
        return EPOCH + datetime.timedelta(milliseconds=moment)
    name = f"{side}Offsets"
    text = options.get(name, str(default)).strip()
    if text.startswith("{"):
        return _edges_by_topic(name, text, topics)
    if text.lower() in NAMED.values():
        return text.lower()  # type: ignore[return-value]
    if text.isascii() and text.isdigit():
        return int(text)
    raise PipelineError(
        f"option {name}={text!r}: must be 'earliest', 'latest', an offset, or JSON with an offset for each topic"
    )


def _edges_by_topic(name: str, text: str, topics: tuple[str, ...] | None) -> tuple[tuple[str, Edge], ...]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PipelineError(f"option {name}={text!r}: is not JSON: {error}") from error
    if any(isinstance(value, dict) for value in found.values()):
        raise PipelineError(
            f"option {name}={text!r}: all partitions share one sequence of offsets; pass one offset for each topic, "
            'such as {"orders": 23, "clicks": -2}'
        )
    if not all(type(value) is int and value >= min(NAMED) for value in found.values()):
        raise PipelineError(f"option {name}={text!r}: must contain offsets, -2 (earliest) or -1 (latest)")
    if topics is None or set(found) != set(topics):
        raise PipelineError(f"option {name}={text!r}: must contain exactly the topics in the option subscribe")
    return tuple((topic, NAMED.get(value, value)) for topic, value in found.items())


def _refuse(name: str, edges: Edges, edge: Edge, why: str) -> None:
    if edge == edges or (isinstance(edges, tuple) and any(one == edge for _, one in edges)):
        raise PipelineError(f"option {name}: {edge!r} is not allowed, because {why}")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The parsed options of a reader."""

    place: Place
    topics: tuple[str, ...] | None = None
    """The topics to read (None: those that match ``pattern``, or all if it is None)."""
    pattern: str | None = None
    start: Edges = "earliest"
    end: Edges = "latest"
    min_partitions: int = 1
    max_offsets_per_trigger: int | None = None
    fail_on_data_loss: bool = True
    push_filters: bool = False
    reader: str = ""

    OFFSETS_PER_PARTITION: ClassVar[int] = 250_000
    MOST_PARTITIONS: ClassVar[int] = 200
    """Offsets per task, and the maximum number of tasks, unless ``minPartitions`` is more."""

    @property
    def wanted(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The condition on topics, in the form of ``reading.Query.wanted``."""
        return () if self.topics is None else (("topic", self.topics),)

    @classmethod
    def of(cls, options: Mapping[str, str], *, is_stream: bool = False) -> SourceOptions:
        """Parse and check the options of a reader. As with Kafka, a stream starts at ``latest`` by default.

        Raises:
            PipelineError: An option is unknown, missing or has an invalid value.
        """
        place = Place.of(options)
        check_known(options, SOURCE_OPTIONS + PLACE_OPTIONS, "the source")
        if ("subscribe" in options) == ("subscribePattern" in options):
            raise PipelineError(
                "pass the topics to read with one of the options subscribe and subscribePattern "
                f"({EVERY_TOPIC!r} reads all topics); Spark does not pass on the options of CREATE TABLE: use "
                "CREATE TEMPORARY VIEW"
            )
        topics = parse_topics(options["subscribe"]) if "subscribe" in options else None
        pattern = _parse_pattern(options.get("subscribePattern", EVERY_TOPIC))
        start = _edges(options, "starting", "latest" if is_stream else "earliest", topics)
        end = _edges(options, "ending", "latest", topics)
        if is_stream and ("endingOffsets" in options or "endingTimestamp" in options):
            raise PipelineError("options endingOffsets and endingTimestamp: a stream has no end; use a batch query")
        if not is_stream:
            _refuse("startingOffsets", start, "latest", "the range would be empty")
        _refuse("endingOffsets", end, "earliest", "the range would be empty")
        return cls(
            place,
            topics,
            None if topics is not None or pattern == EVERY_TOPIC else pattern,
            start,
            end,
            number(options, "minPartitions", most=100_000) or 1,
            number(options, "maxOffsetsPerTrigger", most=2**62),
            flag(options, "failOnDataLoss", default=True),
            flag(options, "pushFilters", default=False),
            _reader_name(options, is_stream=is_stream),
        )


def kafka_headers(options: Mapping[str, str]) -> bool | None:
    """Return whether a reader with the columns of Kafka has the column ``headers``; None for the columns of the log.

    Raises:
        PipelineError: An option has an invalid value.
    """
    columns = options.get("columns", "log")
    with_headers = flag(options, "includeHeaders", default=False)
    if columns not in ("log", "kafka"):
        raise PipelineError(f"option columns={columns!r}: must be 'log' or 'kafka'")
    if columns == "log" and "includeHeaders" in options:
        raise PipelineError("option includeHeaders: pass the option columns='kafka' too; the log's column is metadata")
    return with_headers if columns == "kafka" else None
