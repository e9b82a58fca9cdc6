"""How the values of options are written: on a command line, in a form, and in what people read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

UNITS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
BACKOFF_DURATIONS = frozenset({"initial", "maximum"})


class Form(NamedTuple):
    """How a value is written."""

    read: Callable[[str, str], Any]
    """Gets the option's name, for errors, and a text without spaces around it; raises ``ValueError``."""
    write: Callable[[Any], str | None]
    """Gets a value as JSON has it; returns None for what is not such a value, because plain SQL may have stored it."""


def parse_duration(name: str, text: str) -> float:
    """Return the seconds that a text such as ``90``, ``1.5s`` or ``10m`` stands for."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)?", text, re.IGNORECASE)
    if found is None:
        raise ValueError(f"{name}={text!r}: must be a number of seconds, or a number with ms, s, m, h or d")
    # Not 0.3 * 0.001: the text of the value is shown, and shall be the one that was typed.
    return float(Decimal(found[1]) * UNITS[(found[2] or "s").lower()])


def parse_object(name: str, text: str, example: str) -> Any:
    """Return what JSON text describes, without checking it further."""
    twice: list[str] = []

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # JSON readers use the last value of a name: the condition of the first would be lost.
        twice.extend(name for name, number in Counter(name for name, _ in pairs).items() if number > 1)
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError):
        raise ValueError(f"{name}={text!r}: must be JSON such as {example}") from None
    if twice:
        raise ValueError(f"{name}={text!r}: {twice[0]!r} is given twice in one object")
    return value


def parse_filter(name: str, text: str) -> Any:
    """Return the filter policy that JSON text describes, without checking its conditions."""
    return parse_object(name, text, '{"region": ["eu"]}')


def _parse_integer(name: str, text: str) -> int:
    if re.fullmatch(r"[0-9]{1,12}", text) is None:
        raise ValueError(f"{name}={text!r}: must be an integer")
    return int(text)


def _parse_number(name: str, text: str) -> float:
    if re.fullmatch(r"[0-9]+(?:\.[0-9]+)?", text) is None:
        raise ValueError(f"{name}={text!r}: must be a number")
    return float(text)


def _parse_backoff(name: str, text: str) -> dict[str, float]:
    fields: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{name}={text!r}: must be a list such as initial=1s,factor=2,maximum=1h,jitter=0.1")
        key = key.strip().lower()
        if key in fields:
            raise ValueError(f"{name}={text!r}: {key} is given twice")
        parse = parse_duration if key in BACKOFF_DURATIONS else _parse_number
        fields[key] = parse(f"{name}: {key}", value.strip())
    return fields


def _parse_rates(name: str, text: str) -> Any:
    return parse_object(name, text, '{"acme": "50/s", "*": "5/s"}') if text.startswith("{") else text


def _digits(value: float) -> str:
    """Return all digits of a number, without an exponent."""
    text = f"{Decimal(repr(float(value))):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _backoff_text(value: Any) -> str | None:
    if not isinstance(value, Mapping) or not all(map(_is_number, value.values())):
        return None
    return ",".join(f"{key}={_digits(item)}{'s' * (key in BACKOFF_DURATIONS)}" for key, item in value.items())


def _list_text(value: Any) -> str | None:
    return ",".join(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


INTEGER = Form(_parse_integer, lambda value: None)
DURATION = Form(parse_duration, lambda value: f"{_digits(value)}s" if _is_number(value) else None)
TEXT = Form(lambda name, text: text, lambda value: None)
LIST = Form(lambda name, text: [part.strip() for part in text.split(",")], _list_text)
BACKOFF = Form(_parse_backoff, _backoff_text)
RATES = Form(_parse_rates, lambda value: as_json(value) if isinstance(value, Mapping) else None)
FILTER = Form(parse_filter, lambda value: as_json(value))


def as_json(value: Any) -> str:
    """Return JSON text for people."""
    return json.dumps(value, ensure_ascii=False)
