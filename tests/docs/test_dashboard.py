"""The pages on the dashboard and on its problems are true."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
from django.contrib.auth.models import Group, User

from django_mysqlqueue.admin.formatting import SHOWN_CHARACTERS, redacted
from django_mysqlqueue.admin.operations.base import IdsField
from django_mysqlqueue.admin.pages.base import PAGE_ROWS
from django_mysqlqueue.admin.pages.in_flight import SHOWN_IN_FLIGHT
from django_mysqlqueue.inspection import bounds
from django_mysqlqueue.inspection.problem import Kind
from django_mysqlqueue.options import conf
from tests.support.documents import DOCS, blocks
from tests.support.internals import several
from tests.support.paths import ROOT

pytestmark = pytest.mark.any_engine

DASHBOARD = DOCS / "howto" / "dashboard.md"
TROUBLESHOOT = DOCS / "howto" / "troubleshoot.md"


def _example(page: Path, name: str) -> dict[str, Any]:
    """What the Python block of a page defines in which a name is defined."""
    (text,) = [text for _, text in blocks(page, "python") if re.search(rf"^def {name}\(", text, re.MULTILINE)]
    found: dict[str, Any] = {}
    exec(text, found)  # noqa: S102
    return found


def test_the_page_on_the_dashboard_redacts(settings):
    hook = _example(DASHBOARD, "redact")["redact"]
    settings.MYSQLQUEUE = {"REDACT": hook}
    assert conf.problems() == []
    shown = {
        (topic, kind): redacted("Ada <ada@example.com>", topic=topic, kind=kind)
        for topic in ("orders", "payments", "payments_dlq")
        for kind in ("payload", "metadata", "error")
    }
    hidden = {place for place, text in shown.items() if text == "(hidden)"}
    assert hidden == {(topic, kind) for topic in ("payments", "payments_dlq") for kind in ("payload", "metadata")}
    assert {text for place, text in shown.items() if place not in hidden} == {"Ada <(address)>"}


def test_the_page_on_the_dashboard_gives_permissions(db):
    _example(DASHBOARD, "make_operators")["make_operators"]()
    user = User.objects.create_user("ada", is_staff=True)
    user.groups.set(Group.objects.filter(name="queue operators"))
    assert user.get_all_permissions() == {
        f"django_mysqlqueue.{name}" for name in ("view_dashboard", "operate_dashboard", "view_operation")
    }


def test_the_page_on_troubleshooting_has_every_problem():
    """Its tables begin with the words of the problem and its kind, and its times are the thresholds."""
    text = TROUBLESHOOT.read_text()
    listed = dict(re.findall(r"^\| \*([^*|]+)\* \| `(\w+)` \|", text, re.MULTILINE))
    inspection = ROOT / "django_mysqlqueue" / "inspection"
    files = ("group_problems.py", "queue_problems.py", "subscriber_problems.py", "topics.py")
    source = "".join((inspection / name).read_text() for name in files)
    texts = re.findall(r'\b(?:_|ngettext)\(\s*"([^"]+)"', source)
    texts += ["The database %(alias)s does not answer"]  # an error, too
    kinds = set(re.findall(r'(?:yield|return) Problem\([^"]*"(\w+)"', source))
    assert sorted(listed.values()) == sorted(get_args(Kind))
    assert kinds <= set(get_args(Kind))
    for words in listed:
        parts = [re.escape(part.strip()) for part in words.split("…")]
        assert any(re.search(".*".join(parts), re.sub(r"%\(\w+\)s", "…", one)) for one in texts), words
    times = bounds.STALL_TIMES
    assert (times.outbox, times.stuck, times.still, times.transaction) == (15, 60, 600, 300)  # as the tables say
    assert times.started == 60


def test_the_page_on_the_dashboard_has_the_bounds():
    text = " ".join(DASHBOARD.read_text().split())
    counts = f"Counts stop at {bounds.PAGES.count:,} (a partition's backlog at {bounds.PAGES.partition_count:,})"
    assert counts in text
    assert f"more than {bounds.PAGES.partitions:,} partitions" in text
    assert f"all groups together get {bounds.PAGES.seconds} s" in text
    assert f"the {bounds.PAGES.heads} of each group" in " ".join(TROUBLESHOOT.read_text().split())
    assert f"come in pages of {PAGE_ROWS}" in text
    assert f"more than {bounds.PAGES.merged_partitions} partitions is browsed {bounds.PAGES.walked:,} offsets" in text
    assert f"newest {bounds.PAGES.recorded} records of it and at most {bounds.PAGES.message_groups} groups" in text
    assert f"the first {bounds.PAGES.dead_letters:,} of a topic by partition key" in text
    assert f"searches the text of {bounds.PAGES.errors:,} errors" in text
    assert f"at most {IdsField.most:,} dead letters" in text
    assert f"the {SHOWN_IN_FLIGHT} deliveries" in text
    assert f"no longer than {SHOWN_CHARACTERS:,} bytes" in text
    assert f"does not answer a query, within {several.ANSWER_SECONDS:g} seconds" in text
    assert f"for at most {several.TOTAL_SECONDS:g} seconds" in text
