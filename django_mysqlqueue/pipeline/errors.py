"""Exceptions of the pipeline."""

from __future__ import annotations


class PipelineError(Exception):
    """An option, a row or the state of the archive is invalid. The message names the value and the rule."""


class DataLossError(PipelineError):
    """GC has removed messages that a reader still had to read."""
