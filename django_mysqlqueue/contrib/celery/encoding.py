"""The JSON of Celery's arguments and results, as kombu writes it: types that JSON does not have are objects."""

from __future__ import annotations

import base64
import datetime
import json
import uuid
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

from django.utils.functional import Promise


class _Kind(NamedTuple):
    marker: str
    type: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_KINDS = (
    # A datetime is a date, too.
    _Kind("datetime", datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    _Kind("date", datetime.date, datetime.date.isoformat, lambda text: datetime.datetime.fromisoformat(text).date()),
    _Kind("time", datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    _Kind("decimal", Decimal, str, Decimal),
    _Kind("uuid", uuid.UUID, lambda value: {"hex": value.hex}, lambda fields: uuid.UUID(hex=fields["hex"])),
    # kombu has none.
    _Kind(
        "timedelta",
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda fields: datetime.timedelta(*fields),
    ),
)
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "bytes": str.encode,
    "base64": base64.b64decode,
    **{kind.marker: kind.decode for kind in _KINDS},
}


def encode(value: Any) -> Any:
    """Return a value as JSON has it.

    Raises:
        TypeError: it is not JSON-serializable.
    """
    return json.loads(json.dumps(value, default=_encoded))


def decode(value: Any) -> Any:
    """Return the value that was encoded.

    Raises:
        ValueError: it has an object of an unknown type.
    """
    return json.loads(json.dumps(value), object_hook=_decoded)


def _encoded(value: Any) -> Any:
    if hasattr(value, "__json__"):
        return value.__json__()
    if isinstance(value, Promise):
        return str(value)
    for kind in _KINDS:
        if isinstance(value, kind.type):
            return _as(kind.marker, kind.encode(value))
    if isinstance(value, bytes):
        try:
            return _as("bytes", value.decode())
        except UnicodeDecodeError:
            return _as("base64", base64.b64encode(value).decode())
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _as(marker: str, value: Any) -> dict[str, Any]:
    return {"__type__": marker, "__value__": value}


def _decoded(fields: dict[str, Any]) -> Any:
    if fields.keys() != {"__type__", "__value__"}:
        return fields
    if (decoder := _DECODERS.get(fields["__type__"])) is None:
        raise ValueError(f"__type__ {fields['__type__']!r} is unknown")
    return decoder(fields["__value__"])
