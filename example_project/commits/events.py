"""Commit events: the lines of the input file and the payloads of messages."""

from __future__ import annotations

import datetime
import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

TOPIC = "commits"
REPLAYED = "commits.replayed"
"""The topic to which ``manage.py pipelinedemo`` replays archived events."""


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """A commit event. Events are published in the order of the input file."""

    repository: str
    sha: str
    committed_at: int
    """Seconds since the epoch."""
    parents: int
    files: int
    insertions: int
    deletions: int
    sequence: int
    """The number of the event within its repository, starting at 1."""

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> CommitEvent:
        return cls(**payload)

    @property
    def payload(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def metadata(self) -> dict[str, Any]:
        """What groups may filter by."""
        return {"files": self.files}

    @property
    def moment(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.committed_at, datetime.UTC)

    @property
    def day(self) -> datetime.date:
        return self.moment.date()

    @property
    def is_merge(self) -> bool:
        return self.parents > 1


def read_events(path: Path, limit: int | None = None) -> Iterator[CommitEvent]:
    """Yield the first ``limit`` events of a file (None: all), numbered within their repositories."""
    sequences: Counter[str] = Counter()
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in islice(lines, limit):
            fields = json.loads(line)
            sequences[fields["repository"]] += 1
            yield CommitEvent(**fields, sequence=sequences[fields["repository"]])
