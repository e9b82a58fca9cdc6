"""``TOPICS``: the settings of topics, by name or pattern."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

WILDCARDS = re.compile(r"[*?]")
DATABASES = ("DATABASE", "VIA", "MOVES_FROM")
"""The settings that name databases."""
REMEMBERED = 1000
"""Number of topics whose settings are kept in memory."""


class TopicSettings(NamedTuple):
    """The settings of one topic; None: the general setting applies."""

    retention: float | None = None
    has_retention: bool = False
    partitions: int | None = None
    groupless: bool = False
    """True if the topic is meant to have no consumer group."""
    database: str | None = None
    """Alias of the database that the topic is in."""
    via: str | None = None
    """Alias of the database whose outbox takes its messages, and from which subscribers relay them."""
    moves_from: str | None = None
    """Alias of the database that the topic leaves, in which subscribers work for its groups until they have moved."""


class TopicMap(Mapping[str, Mapping[str, Any]]):
    """The entries of ``TOPICS``.

    An entry is a name or a pattern, in which ``*`` matches any text and ``?`` one character. Each setting of a topic
    comes from the entry with its name, else from the first pattern that matches it and has the setting. Patterns do
    not match DLQ topics.

    Args:
        entries: by name or pattern, the parsed settings, with the names of ``TopicSettings`` in upper case as keys.
        dlq_suffix: the end of the names of DLQ topics.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Any]], dlq_suffix: str) -> None:
        self._entries = entries
        self._dlq_suffix = dlq_suffix
        self._patterns = [
            (re.compile(fnmatch.translate(name)), entry) for name, entry in entries.items() if WILDCARDS.search(name)
        ]
        self._found: dict[str, TopicSettings] = {}

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, topic: str) -> TopicSettings:
        """Return the settings of a topic."""
        found = self._found.get(topic)
        if found is None:
            if len(self._found) >= REMEMBERED:
                self._found.clear()
            found = self._found[topic] = self._find(topic)
        return found

    def _find(self, topic: str) -> TopicSettings:
        merged: dict[str, Any] = {}
        if not topic.endswith(self._dlq_suffix):
            for pattern, entry in reversed(self._patterns):
                if pattern.match(topic):
                    merged |= entry
        merged |= self._entries.get(topic, {})
        given = {name.lower(): value for name, value in merged.items()}
        return TopicSettings(has_retention="retention" in given, **given)

    def names(self) -> list[str]:
        """Return the entries that are names of topics."""
        return [name for name in self if not WILDCARDS.search(name)]

    def declares(self, topic: str) -> bool:
        """Return whether an entry has the topic's name or matches it."""
        return topic in self or any(pattern.match(topic) for pattern, _ in self._patterns)

    def aliases(self) -> list[str]:
        """Return the aliases of databases that the entries name, in their order."""
        named = (entry.get(name) for entry in self._entries.values() for name in DATABASES)
        return list(dict.fromkeys(alias for alias in named if alias is not None))
