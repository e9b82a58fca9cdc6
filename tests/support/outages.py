"""A server that tests take away."""

from __future__ import annotations

PRIVATE = "private"
"""The alias under which this process looks at the private server, past the proxy."""
