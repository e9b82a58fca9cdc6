"""Structured log lines: one event, one verb, then its fields as ``name=value``."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("django_mysqlqueue.subscriber")


def event(level: int, verb: str, *, exc_info: bool = False, **fields: Any) -> None:
    """Logs ``verb name=value …``; the fields are also in the record as ``mysqlqueue``."""
    if not logger.isEnabledFor(level):
        return
    text = " ".join(f"{name}={_shown(value)}" for name, value in fields.items())
    logger.log(level, "%s %s", verb, text, exc_info=exc_info, extra={"mysqlqueue": {"event": verb, **fields}})


def _shown(value: Any) -> str:
    text = str(value)
    return repr(text) if not text or any(character.isspace() or character in "'\"=" for character in text) else text
