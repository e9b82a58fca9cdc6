"""Runs management commands."""

from __future__ import annotations

import io

from django.core.management import call_command


def run(*arguments, **options):
    """Runs a command and returns what it wrote."""
    out = io.StringIO()
    call_command(*arguments, stdout=out, no_color=True, **options)
    return out.getvalue()
