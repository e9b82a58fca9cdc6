"""A full round of GC of the log, as ``queuegc`` and the subscribers run it step by step."""

from __future__ import annotations

from django_mysqlqueue.models import Reader
from tests.support.internals import retention


def collect(using: str, *, dry_run: bool = False, limits: retention.StepLimits = retention.STEP) -> retention.Collected:
    """Run all steps, and return the sum of their results."""
    found = list(retention.steps(using, dry_run=dry_run, limits=limits))
    return retention.Collected(
        sum(step.messages for step in found),
        sum(step.offsets_rows for step in found),
        None,
        retention.by_topic(orphans for step in found for orphans in step.orphans),
    )


def archived_offset() -> int:
    """The offset up to which the archive has the log, as GC knows it; 0: nothing is archived."""
    return Reader.objects.filter(name="archive").values_list("read_offset", flat=True).first() or 0
