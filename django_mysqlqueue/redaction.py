"""What the setting ``REDACT`` hides, on the dashboard's pages and in the report."""

from __future__ import annotations

from django.utils.module_loading import import_string

from django_mysqlqueue.conf import get_settings


def redacted(text: str, *, topic: str, kind: str) -> str:
    """What the setting ``REDACT`` leaves of a text of a message.

    A dead letter's topic is that of the message that failed: what is hidden there is hidden here.

    Args:
        kind: ``"payload"``, ``"metadata"`` or ``"error"``.
    """
    settings = get_settings()
    hook = settings.redact
    if hook is None:
        return text
    if isinstance(hook, str):
        hook = import_string(hook)
    return str(hook(text, topic=topic.removesuffix(settings.dlq_suffix), kind=kind))
