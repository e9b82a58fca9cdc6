"""Exceptions of the pipeline."""

from __future__ import annotations


class PipelineError(Exception):
    """An option, a row or the state of the archive is invalid. The message names the value and the rule."""


class DataLossError(PipelineError):
    """GC has removed messages that a reader still had to read."""


class InvalidMessage(ValueError):
    """A name, a key or another value of a message is invalid. The message names the value and the rule."""
