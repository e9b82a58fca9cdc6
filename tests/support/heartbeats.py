"""Heartbeats that tests stop and delay."""

from __future__ import annotations

from tests.support.harness import USING, Going
from tests.support.internals import GroupRef, Heart

REF = GroupRef("g", "t")


def heart(progress=None, **options):
    defaults = {"interval": 0.05, "lease": 60, "info": {"host": "tests"}, "progress": progress or Going()}
    return Heart(USING, "s:1", [REF], **{**defaults, **options})
