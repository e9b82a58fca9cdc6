"""Paths of the example project's files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVENTS_FILE = ROOT / "example_project" / "data" / "commit_events.jsonl.gz"
OUTPUT = ROOT / "demo-output"
"""Holds the SQLite database and the subscribers' logs; ignored by git."""
