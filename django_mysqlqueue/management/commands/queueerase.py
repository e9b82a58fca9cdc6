"""``manage.py queueerase``: erase the messages of a key, in the archive, too."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.utils.translation import gettext as _

from django_mysqlqueue import operations
from django_mysqlqueue.management.operations import Argument, OperationCommand
from django_mysqlqueue.management.spark import erase_in_archive
from django_mysqlqueue.operations.erasing import topics_of
from django_mysqlqueue.operations.results import Result, number_said
from django_mysqlqueue.options.conf import get_settings


class Command(OperationCommand):
    """Erase the messages of a key."""

    help = (
        "Erase all messages that were published to a topic with a key: in the log, with what refers to them, and then "
        "in the archive. This cannot be undone. The output names what is left, and why. If it is interrupted, run it "
        "again."
    )
    reports_progress = True
    operation = staticmethod(operations.erase)
    arguments = (
        Argument("topic", help="topic of the messages, or its DLQ topic"),
        Argument("--key", required=True, metavar="KEY", help="key with which the messages were published"),
        Argument(
            "--path", to=None, metavar="ROOT", help="folder or URI of the archive (default: MYSQLQUEUE['ARCHIVE_PATH'])"
        ),
    )

    def operate(self, options: dict[str, Any], **how: Any) -> Result:
        """Erase in the log first: what the archive does not have yet never enters it."""
        result = super().operate(options, **how)
        using, dry_run, key = how["using"], how["dry_run"], options["key"]
        if not (path := options["path"] or get_settings().archive_path):
            return result
        found = erase_in_archive(using, path, topics_of(using, options["topic"]), key, dry_run=dry_run)
        if found is None:
            return dataclasses.replace(result, summary=(*result.summary, _("There is no archive yet.")))
        rows, files = found
        text = (
            _("Messages that will be erased in the archive: %(rows)s; files that it no longer needs: %(files)s.")
            if dry_run
            else _("Messages erased in the archive: %(rows)s; files deleted: %(files)s.")
        )
        text %= {"rows": number_said(rows, dry_run=False), "files": f"{files:,}"}
        number = rows + files
        return dataclasses.replace(
            result,
            planned=result.planned + number,
            changed=result.changed + (0 if dry_run else number),
            summary=(*result.summary, text),
        )
