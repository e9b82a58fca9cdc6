"""The setting ``REDACT``, applied on the dashboard's pages and in the report."""

from __future__ import annotations

from django.utils.module_loading import import_string

from django_mysqlqueue.conf import get_settings


def redacted(text: str, *, topic: str, kind: str) -> str:
    """Return a text of a message, redacted by the function in the setting ``REDACT``.

    The function gets the original topic of a dead letter, so that dead letters are redacted like their messages.

    Args:
        text: the text.
        topic: the topic of the message.
        kind: ``"payload"``, ``"metadata"`` or ``"error"``.
    """
    settings = get_settings()
    hook = settings.redact
    if hook is None:
        return text
    if isinstance(hook, str):
        hook = import_string(hook)
    return str(hook(text, topic=topic.removesuffix(settings.dlq_suffix), kind=kind))
