"""Settings for tools/screenshots.py: those of the example project, with all deliveries recorded."""

from __future__ import annotations

from example_project.paths import ROOT
from example_project.settings import *  # noqa: F403
from example_project.settings import MYSQLQUEUE as EXAMPLE


def without_paths(text: str, *, topic: str, kind: str) -> str:
    """Remove the checkout's folder from errors, so that screenshots do not show it."""
    return text.replace(f"{ROOT}/", "") if kind == "error" else text


MYSQLQUEUE = {
    **EXAMPLE,
    "RECORD_DELIVERIES": "all",
    "REDACT": without_paths,
    # The topic of the scheduled messages in the screenshots. It has no handler.
    "TOPICS": {"newsletters": {"GROUPLESS": True}},
}
