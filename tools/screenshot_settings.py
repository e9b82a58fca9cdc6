"""Settings of the site that tools/screenshots.py takes pictures of: the example's, with every delivery on record."""

from __future__ import annotations

from example_project.settings import *  # noqa: F403
from example_project.settings import MYSQLQUEUE as EXAMPLE

MYSQLQUEUE = {**EXAMPLE, "RECORD_DELIVERIES": "all"}  # type: ignore[dict-item]
