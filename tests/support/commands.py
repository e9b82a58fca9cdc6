"""Runs management commands."""

from __future__ import annotations

import io

from django.core.management import call_command


def run(*arguments, **options):
    """Runs a command and returns what it wrote."""
    out = io.StringIO()
    call_command(*arguments, stdout=out, no_color=True, **options)
    return out.getvalue()


def table(text, heading):
    """The rows below a heading, as dicts by column."""
    lines = text.splitlines()
    lines = lines[lines.index(heading) + 1 :]
    end = next((number for number, line in enumerate(lines) if not line), len(lines))
    header, *rows = ([cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in lines[:end])
    return [dict(zip(header, row, strict=True)) for row in rows]
