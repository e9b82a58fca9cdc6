"""Numbers in the sentences of results."""

from __future__ import annotations

from django.utils.translation import gettext as _

from django_mysqlqueue.operations.limits import COUNTED


def counted(number: int) -> str:
    """``12``; from ``COUNTED`` on ``10,000 or more``."""
    return f"{number:,}" if number < COUNTED else _("%(number)s or more") % {"number": f"{number:,}"}
