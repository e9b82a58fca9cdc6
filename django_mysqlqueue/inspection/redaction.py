"""The setting ``REDACT``, applied on the dashboard's pages and in the report."""

from __future__ import annotations

from collections.abc import Callable

from django.utils.module_loading import import_string

from django_mysqlqueue.options.conf import get_settings


def hook() -> Callable[..., str] | None:
    """Return the function in the setting ``REDACT``, or None."""
    found = get_settings().redact
    return import_string(found) if isinstance(found, str) else found


def redacted(text: str, *, topic: str, kind: str) -> str:
    """Return a text of a message or of its dead letter, redacted by the function in the setting ``REDACT``."""
    function = hook()
    if function is None:
        return text
    return str(function(text, topic=topic.removesuffix(get_settings().dlq_suffix), kind=kind))
