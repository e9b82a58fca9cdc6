"""What the pipeline raises on purpose."""

from __future__ import annotations


class PipelineError(Exception):
    """An option, a row or a state of the archive breaks a rule; the text names the value and the rule."""


class DataLossError(PipelineError):
    """GC has removed messages that a reader would have to see."""
