"""The queue on an alias of its own."""

from __future__ import annotations

import io

from django.core.management import call_command

from django_mysqlqueue.models import OutboxMessage

QUEUE = "queue"


def command(*arguments, **options):
    out = io.StringIO()
    call_command(*arguments, stdout=out, no_color=True, **options)
    return out.getvalue()


def on_queue(model=OutboxMessage):
    return model.objects.using(QUEUE).count()
