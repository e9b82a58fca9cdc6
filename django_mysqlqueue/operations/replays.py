"""The operation that replays a range of the log into one group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from django.utils.translation import gettext as _

from django_mysqlqueue import naming
from django_mysqlqueue.arguments import checked
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.humanize import up_to
from django_mysqlqueue.limits import REPLAY_RUN
from django_mysqlqueue.operations import replaying
from django_mysqlqueue.operations.arguments import alias_for, check_limit, offsets_of, text
from django_mysqlqueue.operations.limits import COUNTED
from django_mysqlqueue.operations.lookups import group_of
from django_mysqlqueue.operations.replaying import Counted, Range
from django_mysqlqueue.operations.results import ReplayResult, result_of
from django_mysqlqueue.service import log
from django_mysqlqueue.service.job_results import is_of_jobs
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import Session


@checked(OperationRefused, only=("progress",))
def replay(
    group: str,
    topic: str,
    first: int,
    last: int,
    *,
    key: str | None = None,
    run: str = "",
    limit: int | None = None,
    actor: str,
    reason: str = "",
    using: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int], object] = lambda rows: None,
) -> ReplayResult:
    """Publish the messages of a range of the log again, only for one consumer group.

    The group's position does not change, and other groups get nothing. The copies are new messages at the end of the
    log: with new ids, in the same partitions, and in the same order. They neither expire nor coalesce, and their
    metadata has ``replayed_from`` with the run and the original's topic, offset, id and ``published_at``.

    Left out are messages that the group's filter does not match now, messages for other groups, redriven messages, and
    copies of an earlier replay.

    The id of a copy is made from ``run`` and the offset of the original. If the replay is interrupted, run it again
    with the same arguments: it publishes only the missing copies, as long as the others are in the log or among the
    newest 2,000 messages of the outbox. If two calls run at the same time, the sequencer drops the second copies as
    duplicates.

    Args:
        group: the consumer group.
        topic: the topic that it reads.
        first: the first offset.
        last: the last offset, included; at most the end of the log.
        key: only messages of the partition with this key.
        run: the name of the run, 1 to 60 characters from A-Z, a-z, 0-9, ``.``, ``_`` and ``-`` (default: a digest of
            group, topic, range and key). To replay the same messages once more, pass another one.
        limit: maximum number of messages. Then at most about 100,000 messages of the log are read, and ``upto`` of the
            result says how far.
        actor: who runs the operation, for the audit log.
        reason: why, for the audit log.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
        dry_run: change nothing; return what would be changed.
        progress: called after each transaction with the number of copies that it published.

    Raises:
        OperationRefused: there is no such group, or it handles jobs or dead letters; an argument is out of range; the
            group's filter cannot be parsed; or a seek or drop of the group has not finished. What was replayed before
            that stays.
    """
    with alias_for(using, actor, reason, group=group, topic=topic) as alias:
        ref = group_of(alias, group, topic).ref
        check_limit(limit)
        wanted = _range(alias, ref, first, last, key, run)
        if dry_run:
            return _previewed(wanted, replaying.preview(alias, wanted, most=limit or COUNTED), limit)
        # With a limit, the same part of the range as in a preview with this limit.
        upto = last if limit is None else replaying.preview(alias, wanted, most=limit).upto
        found = replaying.replay(alias, wanted, upto=upto, actor=actor, reason=reason, progress=progress)
        said = _("Messages published again for the group %(ref)s: %(number)s.")
        values = {"ref": ref, "number": f"{found.replayed:,}"}
        return _result(wanted, found, said % values, *_rest(wanted, found), dry_run=False)


def _range(alias: str, ref: GroupRef, first: int, last: int, key: str | None, run: str) -> Range:
    """Return the checked range.

    Raises:
        OperationRefused: an argument is out of range, or the group handles jobs or dead letters.
    """
    if naming.is_dlq(ref.topic):
        raise OperationRefused(f"topic {ref.topic!r}: dead letters are redriven, not replayed")
    if is_of_jobs(ref):
        raise OperationRefused(f"group {str(ref)!r}: a job runs once; enqueue it again, or redrive its dead letter")
    offsets_of([first], "first")
    offsets_of([last], "last")
    if last < first:
        raise OperationRefused(f"last {last}: must be at least the first offset, {first}")
    if last > (end := log.end_of_log(Session(alias))):
        raise OperationRefused(f"last {last}: the log ends at {end}")
    if key is not None:
        text("key", key, most=naming.KEY_LENGTH)
    if run and not REPLAY_RUN.fullmatch(text("run", run, most=1000)):
        raise OperationRefused(f"run {run!r}: must be 1 to 60 characters from A-Z, a-z, 0-9, '.', '_' and '-'")
    named = [*ref, first, last, key]
    return Range(ref, first, last, run or hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16], key)


def _previewed(wanted: Range, found: Counted, limit: int | None) -> ReplayResult:
    number = up_to(COUNTED, found.replayed) if limit is None else f"{found.replayed:,}"
    values = {"number": number, "ref": wanted.ref, "first": wanted.first, "last": wanted.last}
    said = [_("No message at the offsets %(first)s to %(last)s is to be replayed into the group %(ref)s.") % values]
    if found.replayed:
        settled = f"{found.replayed - found.unsettled:,}"
        said = [
            _("Messages at the offsets %(first)s to %(last)s that only the group %(ref)s will get again: %(number)s.")
            % values,
            _("Of these, the group has settled or passed: %(number)s.") % {"number": settled},
            _("The copies enter the log at its end. The position of the group does not change."),
        ]
    warnings = []
    if found.unsettled:
        text = _("The group has not settled %(number)s of these messages and will get them twice.")
        warnings = [text % {"number": f"{found.unsettled:,}"}]
    details = {"warnings": tuple(warnings), "unsettled": found.unsettled}
    return _result(wanted, found, *said, *_rest(wanted, found), dry_run=True, **details)


def _rest(wanted: Range, found: Counted) -> list[str]:
    """Return sentences about what is left out, and about the end of the range if it was not reached."""
    left_out = (
        (found.filtered, _("Left out because the filter of the group does not match: %(number)s.")),
        (
            found.others,
            _("Left out because they are for other groups, or repeat other messages of the topic: %(number)s."),
        ),
        (found.published, _("Left out because this run has published them before: %(number)s.")),
    )
    said = [text % {"number": f"{number:,}"} for number, text in left_out if number]
    if found.upto < wanted.last:
        values = {"upto": found.upto, "next": found.upto + 1}
        said.append(_("This covers the offsets up to %(upto)s. To continue, replay from offset %(next)s.") % values)
    return said


def _result(wanted: Range, found: Counted, *summary: str, dry_run: bool, **details: Any) -> ReplayResult:
    return result_of(
        ReplayResult,
        "replay",
        found.replayed,
        *summary,
        dry_run=dry_run,
        run=wanted.run,
        upto=found.upto,
        filtered=found.filtered,
        left_out=found.others,
        already_published=found.published,
        **details,
    )
