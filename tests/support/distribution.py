"""What the packaging tests share: a copy of the project as a clone would be, and what is built from it."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
LEFT_OUT = (
    ".git",
    ".test",
    ".venv",
    ".*_cache",
    ".hypothesis",
    ".coverage*",
    "build",
    "dist",
    "demo-output",
    "htmlcov",
    "*.egg-info",
    "*.py[cod]",
    "*.sqlite3*",
    "__pycache__",
)
"""What .gitignore names, and Git's own: stale files of an earlier build would get into the wheel."""


def copy_project(folder: Path) -> Path:
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return folder
