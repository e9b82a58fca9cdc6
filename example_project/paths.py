"""Where the example's files are."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVENTS_FILE = ROOT / "example_project" / "data" / "commit_events.jsonl.gz"
OUTPUT = ROOT / "demo-output"
"""The embedded database and the subscribers' logs; git ignores it."""
