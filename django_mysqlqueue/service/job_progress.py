"""The progress that a job has reported, as the column ``progress`` has it."""

from __future__ import annotations

import datetime
import json
import math
from dataclasses import dataclass, field

from django_mysqlqueue.db.sizes import PROGRESS_MESSAGE_LENGTH
from django_mysqlqueue.service.job_rows import as_json, moment


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress that a job has reported."""

    done: float
    total: float | None
    message: str
    at: datetime.datetime = field(compare=False)
    """When it was reported, aware if ``USE_TZ`` is True."""

    @property
    def fraction(self) -> float | None:
        """The part that is done, from 0 to 1; None without a total."""
        return None if self.total is None else min(1.0, self.done / self.total)


def encode(done: float, total: float | None, message: str, now_ms: int) -> str:
    """Return progress as it is stored.

    ``total``: how much there is to do, or None. ``message``: a text, of which the first ``PROGRESS_MESSAGE_LENGTH``
    characters are stored.

    Raises:
        ValueError: a number is negative or not finite, or ``total`` is 0.
        TypeError: it is not a number.
    """
    text = str(message)[:PROGRESS_MESSAGE_LENGTH].encode("utf-8", "replace").decode()
    value = {
        "done": _number("done", done, ", at least 0"),
        "total": None if total is None else _number("total", total, " above 0, or None"),
        "message": text,
        "at": now_ms,
    }
    return as_json(value)


def _number(name: str, value: float, rule: str) -> float:
    """Return a number as JSON has it: a Decimal, for example, as a float."""
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    except ValueError:
        found = math.nan
    if not math.isfinite(found) or found < 0 or (found == 0 and name == "total"):
        raise ValueError(f"{name}={value}: must be a finite number{rule}")
    return int(found) if found.is_integer() and found < 2**53 else found


def decode(column: str) -> Progress | None:
    """Return the column ``progress``, or None if it is empty."""
    if not column:
        return None
    found = json.loads(column)
    at = moment(found["at"])
    assert at is not None  # noqa: S101  # Its writer has set it.
    return Progress(found["done"], found["total"], found["message"], at)
