"""The filter language: conditions on a message's metadata, in the syntax of Amazon SNS subscription filter policies.

``parse`` checks a policy and compiles it to closures, so that checking a message takes a few function calls. It needs
neither settings nor a database. ``docs/reference/filters.md`` describes the language.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from django_mysqlqueue.db.sizes import MAX_METADATA_DEPTH
from django_mysqlqueue.filter_conditions import (
    ABSENT,
    NOTHING,
    OPERATORS,
    SCALARS,
    Condition,
    Test,
    exact,
    flat,
    found,
    is_present,
    named,
    parse_operator,
    parse_scalar,
    parse_string,
    quoted,
    refuse,
    scalars,
)
from django_mysqlqueue.names.rules import RESERVED_PREFIX

MAX_KEYS = 50
"""Maximum number of keys with a list of values, at all levels and in all alternatives."""
MAX_VALUES = 500
"""Maximum number of values of all keys together. Each value in the list of an ``anything-but`` counts."""
MAX_NESTING = MAX_METADATA_DEPTH
"""Maximum number of levels of keys and ``$or``: metadata is not nested more deeply."""
MAX_COMBINATIONS = 150
"""Maximum number of ways to choose one alternative from each ``$or``: the number of policies without ``$or`` that would
select the same messages."""
MAX_POLICY_BYTES = 65_535
"""Maximum size of a policy as JSON in UTF-8: that of metadata."""

OR = "$or"


@dataclass(frozen=True, slots=True)
class FilterPolicy:
    """A filter on the metadata of messages, made by ``parse``.

    Two filters are equal if their canonical forms are. ``str()`` returns the conditions for people, for example
    ``region is "eu" and total >= 100``.
    """

    text: str
    """The canonical form as JSON text."""
    _root: _Part = field(repr=False, compare=False)

    def matches(self, metadata: Mapping[str, Any]) -> bool:
        """Return whether a message matches. No decoded JSON object raises an exception.

        Args:
            metadata: the message's metadata.
        """
        return self._root.test(metadata)

    def explain(self, metadata: Mapping[str, Any]) -> str:
        """Return a sentence that says why a message matches or does not match.

        If the message does not match, the sentence names the first condition that is not met, in the order of the
        canonical form, and the value that was found.

        Args:
            metadata: the message's metadata.
        """
        if self._root.test(metadata):
            return f"Matches: {' and '.join(_unique(self._root.found(metadata)))}."
        missed = self._root.missed(metadata)
        return f"Does not match: {missed.found} (required: {missed.required})."

    def as_json(self) -> dict[str, Any]:
        """Return the canonical form, which ``parse`` reads again: keys and values are sorted, duplicates removed."""
        policy: dict[str, Any] = json.loads(self.text)
        return policy

    def __str__(self) -> str:
        return self._root.text

    def __reduce__(self) -> tuple[Callable[[object], FilterPolicy], tuple[dict[str, Any]]]:
        return parse, (self.as_json(),)  # closures can be neither pickled nor copied


def parse(policy: object) -> FilterPolicy:
    """Return the filter that a policy describes.

    Args:
        policy: a dict in the syntax of Amazon SNS subscription filter policies.

    Raises:
        ValueError: the policy is invalid or too large. The text names the place and the rule.
    """
    root = _Parser().group(policy, "filter", ())
    if root.combinations > MAX_COMBINATIONS:
        refuse("filter", f"$or has {root.combinations:,} combinations, but at most {MAX_COMBINATIONS:,} are allowed")
    text = _canonical(root.as_json())
    size = len(text.encode())
    if size > MAX_POLICY_BYTES:
        refuse("filter", f"has {size:,} bytes as JSON, but at most {MAX_POLICY_BYTES:,} are allowed")
    return FilterPolicy(text, root)


def _canonical(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


# -- the parts of a policy ----------------------------------------------------


class _Missed(NamedTuple):
    """A condition that a message does not meet."""

    found: str
    required: str


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A key with a list of values, of which one must match."""

    combinations: ClassVar = 1

    key: str
    name: str
    """The key after those of the objects that contain it."""
    conditions: list[Condition]
    test: Test

    @property
    def text(self) -> str:
        texts = [f"{self.name} {condition.text}" for condition in self.conditions]
        if len(texts) == 1:
            return texts[0]
        return " or ".join(
            f"({text})" if condition.is_range else text for condition, text in zip(self.conditions, texts, strict=True)
        )

    @property
    def joined_by(self) -> str:
        """What joins the conditions in the text: "and", "or", or "" if there is one."""
        if len(self.conditions) > 1:
            return "or"
        return "and" if self.conditions[0].is_range else ""

    def as_json(self) -> dict[str, Any]:
        return {self.key: [value for condition in self.conditions for value in condition.values]}

    def found(self, metadata: Mapping[str, Any]) -> list[str]:
        return [f"{self.name} {found(metadata.get(self.key, NOTHING))}"]

    def missed(self, metadata: Mapping[str, Any]) -> _Missed:
        return _Missed(self.found(metadata)[0], self.text)


@dataclass(frozen=True, slots=True)
class _Nested:
    """A key with conditions on the object that is its value, or on one object in the array that is its value."""

    key: str
    name: str
    inner: _Part
    test: Test

    @property
    def text(self) -> str:
        return self.inner.text

    @property
    def joined_by(self) -> str:
        return self.inner.joined_by

    @property
    def combinations(self) -> int:
        return self.inner.combinations

    def as_json(self) -> dict[str, Any]:
        return {self.key: self.inner.as_json()}

    def found(self, metadata: Mapping[str, Any]) -> list[str]:
        objects = _objects(metadata.get(self.key, NOTHING))
        return next(self.inner.found(value) for value in objects if self.inner.test(value))

    def missed(self, metadata: Mapping[str, Any]) -> _Missed:
        objects = _objects(metadata.get(self.key, NOTHING))
        if len(objects) == 1:
            return self.inner.missed(objects[0])
        return _Missed(f"none of the {len(objects):,} objects in {self.name} matches", self.text)


@dataclass(frozen=True, slots=True)
class _Or:
    """Alternatives, of which one must match."""

    joined_by: ClassVar = "or"

    parts: list[_Part]
    test: Test

    @property
    def text(self) -> str:
        return " or ".join(f"({part.text})" if part.joined_by == "and" else part.text for part in self.parts)

    @property
    def combinations(self) -> int:
        return sum(part.combinations for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        return {OR: [part.as_json() for part in self.parts]}

    def found(self, metadata: Mapping[str, Any]) -> list[str]:
        return next(part.found(metadata) for part in self.parts if part.test(metadata))

    def missed(self, metadata: Mapping[str, Any]) -> _Missed:
        return _Missed(" and ".join(_unique(part.missed(metadata).found for part in self.parts)), self.text)


@dataclass(frozen=True, slots=True)
class _And:
    """Several conditions that must all be met."""

    joined_by: ClassVar = "and"

    parts: list[_Part]
    test: Test

    @property
    def text(self) -> str:
        def is_apart(part: _Part) -> bool:
            return part.joined_by == "or" or (part.joined_by == "and" and isinstance(part, _Leaf))

        return " and ".join(f"({part.text})" if is_apart(part) else part.text for part in self.parts)

    @property
    def combinations(self) -> int:
        return math.prod(part.combinations for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        return {key: value for part in self.parts for key, value in part.as_json().items()}

    def found(self, metadata: Mapping[str, Any]) -> list[str]:
        return [text for part in self.parts for text in part.found(metadata)]

    def missed(self, metadata: Mapping[str, Any]) -> _Missed:
        return next(part.missed(metadata) for part in self.parts if not part.test(metadata))


_Part = _Leaf | _Nested | _Or | _And


# -- parsing ------------------------------------------------------------------


@dataclass(slots=True)
class _Parser:
    """Parses one policy and counts its keys and values."""

    keys: int = 0
    values: int = 0

    def group(self, policy: object, place: str, path: tuple[str, ...], depth: int = 1) -> _Part:
        """Parse a dict of conditions that must all be met."""
        if not isinstance(policy, Mapping):
            refuse(place, f"must be a dict of keys and lists of values, not {named(policy)}")
        if depth > MAX_NESTING:
            refuse(place, f"is nested more than {MAX_NESTING} levels deep")
        if not policy:
            hint = ". To receive all messages, leave the filter out" if depth == 1 else ""
            refuse(place, f"must not be empty{hint}")
        keys: dict[str, Any] = {}
        for key, value in policy.items():
            if not isinstance(key, str):
                refuse(place, f"has the key {named(key)}, but keys must be strings")
            if key.startswith(RESERVED_PREFIX) and not path:
                refuse(f"{place}[{named(key)}]", f"names that start with {RESERVED_PREFIX!r} are reserved")
            keys[parse_string(key, f"{place}[{named(key)}]")] = value
        parts = [self.part(key, keys[key], f"{place}[{named(key)}]", path, depth) for key in sorted(keys)]
        return parts[0] if len(parts) == 1 else _And(parts, _all([part.test for part in parts]))

    def part(self, key: str, value: object, place: str, path: tuple[str, ...], depth: int) -> _Part:
        if key == OR:
            return self.alternatives(value, place, path, depth)
        if depth > 1 and key in OPERATORS:
            refuse(place, f"{key!r} is an operator here, which must be a dict in a list: [{{{key!r}: …}}]")
        inner = (*path, key)
        if isinstance(value, Mapping):
            group = self.group(value, place, inner, depth + 1)
            return _Nested(key, _name(inner), group, _nested_test(key, group.test))
        if not isinstance(value, (list, tuple)):
            refuse(place, f"must be a list of values or a dict of nested keys, not {named(value)}")
        if not value:
            refuse(place, "must not be an empty list, because no message would match")
        conditions = self.conditions(value, place)
        return _Leaf(key, _name(inner), conditions, _leaf_test(key, conditions))

    def alternatives(self, value: object, place: str, path: tuple[str, ...], depth: int) -> _Or:
        if not isinstance(value, (list, tuple)) or len(value) < 2:
            refuse(place, "must be a list of two or more dicts, of which one must match")
        groups: dict[str, _Part] = {}
        for index, policy in enumerate(value):
            group = self.group(policy, f"{place}[{index}]", path, depth + 1)
            text = _canonical(group.as_json())
            if text in groups:
                refuse(f"{place}[{index}]", "repeats an alternative")
            groups[text] = group
        ordered = [groups[text] for text in sorted(groups)]
        return _Or(ordered, _any([group.test for group in ordered]))

    def conditions(self, values: Iterable[object], place: str) -> list[Condition]:
        """Parse a key's list. Exact values become one condition."""
        literals: list[Any] = []
        operators: dict[str, Condition] = {}
        size = 0
        for index, value in enumerate(values):
            where = f"{place}[{index}]"
            if isinstance(value, Mapping):
                condition = parse_operator(value, where)
                size += condition.size
                if isinstance(condition.values[0], dict):
                    operators[_canonical(condition.values)] = condition
                else:
                    literals += condition.values  # {"numeric": ["=", 5]} is 5
            else:
                literals.append(parse_scalar(value, where))
                size += 1
        self.keys, self.values = self.keys + 1, self.values + size
        if self.keys > MAX_KEYS:
            refuse(place, f"is key {self.keys} of the filter, but at most {MAX_KEYS} are allowed")
        if self.values > MAX_VALUES:
            refuse(place, f"brings the filter to {self.values:,} values, but at most {MAX_VALUES} are allowed")
        return [*([exact(literals)] if literals else []), *(operators[text] for text in sorted(operators))]


def _name(path: tuple[str, ...]) -> str:
    return ".".join(one if re.fullmatch(r"[\w-]+", one) else quoted(one) for one in path)


# -- tests --------------------------------------------------------------------


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the objects that nested conditions are compared with. A value without objects counts as an empty one."""
    return [one for one in flat(value) if isinstance(one, Mapping)] or [{}]


def _leaf_test(key: str, conditions: list[Condition]) -> Test:
    scalar = _any([one.test for one in conditions])
    element = _any([one.test for one in conditions if one is not ABSENT])
    absent = any(one is ABSENT for one in conditions)

    def test(metadata: Mapping[str, Any]) -> bool:
        value = metadata.get(key, NOTHING)
        if type(value) in SCALARS:
            return scalar(value)
        if value is NOTHING:
            return absent
        elements = scalars(value)
        return any(map(element, elements)) or (absent and not any(map(is_present, elements)))

    return test


def _nested_test(key: str, inner: Test) -> Test:
    def test(metadata: Mapping[str, Any]) -> bool:
        value = metadata.get(key, NOTHING)
        return inner(value) if type(value) is dict else any(map(inner, _objects(value)))

    return test


def _all(tests: list[Test]) -> Test:
    if len(tests) == 2:  # as often as not; half the time of the loop
        first, second = tests
        return lambda value: first(value) and second(value)

    def test(value: Any) -> bool:
        for one in tests:  # noqa: SIM110 (a generator would take twice as long)
            if not one(value):
                return False
        return True

    return test


def _any(tests: list[Test]) -> Test:
    if len(tests) == 1:
        return tests[0]

    def test(value: Any) -> bool:
        for one in tests:  # noqa: SIM110
            if one(value):
                return True
        return False

    return test
