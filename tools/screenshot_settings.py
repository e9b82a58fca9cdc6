"""Settings of the site that tools/screenshots.py takes pictures of: the example's, with every delivery on record."""

from __future__ import annotations

from example_project.paths import ROOT
from example_project.settings import *  # noqa: F403
from example_project.settings import MYSQLQUEUE as EXAMPLE


def without_paths(text: str, *, topic: str, kind: str) -> str:
    """What a picture shows of an error: no folder of the machine that it was taken on."""
    return text.replace(f"{ROOT}/", "") if kind == "error" else text


MYSQLQUEUE = {
    **EXAMPLE,
    "RECORD_DELIVERIES": "all",
    "REDACT": without_paths,
    # What is scheduled in the pictures; it has no handler.
    "TOPICS": {"newsletters": {"GROUPLESS": True}},
}
