"""Drop a registered reader, so that GC no longer keeps messages for it."""

from __future__ import annotations

from typing import Unpack

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_mysqlqueue.arguments import spelled_out
from django_mysqlqueue.exceptions import OperationRefused
from django_mysqlqueue.operations.declaring import How, operating
from django_mysqlqueue.operations.lookups import known_names
from django_mysqlqueue.operations.results import Result, result_of
from django_mysqlqueue.service import log, readers
from django_mysqlqueue.sql.session import Session


@spelled_out
def drop_reader(reader: str, **how: Unpack[How]) -> Result:
    """Forget a registered reader, such as a stream of Spark. GC no longer keeps messages for it.

    A stream that still runs registers again with its next micro-batch.

    Args:
        reader: its name.

    Raises:
        OperationRefused: there is no such reader.
    """
    with operating(how, reader=reader) as (alias, by, dry_run):
        session = Session(alias)
        found = {one.name: one for one in readers.registered(session)}
        if reader not in found:
            names = known_names("Readers", reader, dict.fromkeys(found))
            raise OperationRefused(f"There is no registered reader {reader!r}.", known=names)
        if not dry_run:
            changed = int(readers.drop(alias, reader, **by))
            text = _("The reader %(name)s is dropped.") if changed else _("The reader %(name)s no longer exists.")
            return result_of(Result, readers.DROP, changed, text % {"name": reader}, dry_run=False)
        unread = max(0, log.end_of_log(session) - found[reader].offset)
        kept = ngettext(
            "It has yet to read %(number)s offset of the log. GC may delete what it keeps only for this reader.",
            "It has yet to read %(number)s offsets of the log. GC may delete what it keeps only for this reader.",
            unread,
        )
        return result_of(
            Result,
            readers.DROP,
            1,
            _("The position of the reader %(name)s will be deleted.") % {"name": reader},
            kept % {"number": f"{unread:,}"},
            dry_run=True,
            warnings=(_("A stream that still runs registers again with its next micro-batch: stop it first."),),
        )
