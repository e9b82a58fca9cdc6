"""What the dashboard says about the filters of groups."""

from __future__ import annotations

import json

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import Message, operations, publish, publish_many, subscriber
from django_mysqlqueue.admin.operations import OPERATIONS
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.models import ConsumerGroup, QueueMessage
from tests.support.dashboard import HOSTILE, ROOT, WAITS, confirm, life, page
from tests.support.handlers import both_modes, fail
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import register_groups, rollups
from tests.support.registered import handle
from tests.support.scenarios import offsets_of

pytestmark = pytest.mark.any_engine

EU = parse({"region": ["eu"]})
UNKNOWN = {"region": [{"sounds-like": "eu"}]}
WHY = 'Does not match: region is "us" (required: region is "eu").'


def publish_from(*regions):
    publish_many("t", [Message(n, key="k", metadata={"region": region}) for n, region in enumerate(regions)])
    sequence()
    return offsets_of()


def register(policy):
    ConsumerGroup.objects.update(filter=policy)


def shown(client, offset, group="g"):
    """The tag, the last step's text and what is below it, and the note."""
    answer = client.get(f"{ROOT}message/", {"offset": offset})
    assert answer.status_code == 200, answer.content.decode()
    (one,) = [one for one in answer.context["lives"] if one.ref.group == group]
    return one.tag, one.steps[-1].text, one.steps[-1].error, one.note


# -- the page of a message ----------------------------------------------------


@both_modes
@pytest.mark.parametrize("recorded", ["all", "failures", "none"])
def test_a_message_that_is_passed(client, settings, mode, recorded):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": recorded}
    sub = Sub(handler(mode=mode, filter=EU))
    (offset,) = publish_from("us")
    tag, text, why, _ = shown(client, offset)
    assert tag == "not claimed yet"
    assert text == "The group's filter does not match the message. It will be passed without calling the handler."
    assert why == WHY
    sub.settle()
    tag, text, why, note = shown(client, offset)
    assert tag == "filtered"
    assert "it was passed without calling the handler, unless it was settled before the filter was changed." in text
    assert why == WHY
    assert bool(note) == (recorded != "all"), "deliveries that are not recorded prove nothing"
    register({"region": ["us"]})
    tag, text, _, _ = shown(client, offset)
    assert tag == "settled"
    assert text.endswith("It may have been passed because of an earlier filter.")


def test_a_message_that_was_passed_and_is_above_the_watermark(client):
    """It has no row, so it has certainly not been delivered."""
    sub = Sub(handler(filter=EU, function=fail, max_attempts=9, backoff=WAITS))
    first, passed, second = publish_from("eu", "us", "eu")
    sub.step()
    sub.work()
    sub.flush()
    assert shown(client, passed)[:2] == (
        "filtered",
        "The group's filter does not match the message. It was passed without calling the handler.",
    )
    tag, text, why, _ = shown(client, first)
    assert (tag, text) == ("waiting", "The group's filter matches the message.")
    assert why == 'Matches: region is "eu".'
    register({"region": ["us"]})
    tag, text, why, _ = shown(client, passed)
    assert tag == "skipped"
    assert text.startswith("The group's filter matches the message. It may have been passed because of an earlier")
    for claimed in (first, second):
        tag, text, why, _ = shown(client, claimed)
        assert tag == "waiting"
        assert text.endswith("but filters are applied only once, when a message is first claimed.")
        assert why == 'Does not match: region is "eu" (required: region is "us").'


@both_modes
def test_a_message_that_was_delivered_before_the_filter_changed(client, settings, mode):
    settings.MYSQLQUEUE = {"RECORD_DELIVERIES": "all"}
    sub = Sub(handler(mode=mode))
    (offset,) = publish_from("us")
    sub.settle()
    assert "filter" not in " ".join(life(client, offset)[1]).lower()
    register(EU.as_json())
    tag, text, why, note = shown(client, offset)
    assert (tag, note) == ("acked", "")
    assert text.endswith("It was delivered before the filter was changed.")
    assert why == WHY


def test_failures_are_recorded_deliveries_too(client):
    """The ack is not recorded by default, but a failed attempt before it is."""

    def fail_once(delivery):
        if delivery.attempt == 1:
            raise ValueError("no")

    sub = Sub(handler(function=fail_once))
    (offset,) = publish_from("us")
    sub.settle()
    register(EU.as_json())
    tag, text, _, _ = shown(client, offset)
    assert tag == "settled"
    assert "It was delivered before the filter was changed" in text


def test_the_override_counts(client, no_handlers):
    Sub(handler(filter=EU))
    (offset,) = publish_from("us")
    operations.settings("g", "t", {"filter": {"region": ["us"]}}, actor="ops")
    assert shown(client, offset)[1] == "The group's filter matches the message."
    operations.settings("g", "t", {"filter": None}, actor="ops")
    assert shown(client, offset)[1].startswith("Nothing holds it up")


def test_a_message_that_supersedes_others_bypasses_the_filter(client):
    """It is not claimed yet, because another one is in flight."""
    sub = Sub(handler(max_in_flight=1), threads=9)
    for coalesce, region in ((None, "eu"), ("c", "eu"), ("c", "us")):
        publish("t", 1, key="k", coalesce=coalesce, metadata={"region": region})
    sub.step(times=3)
    register(EU.as_json())
    tag, text, why, note = shown(client, QueueMessage.objects.latest("offset").offset)
    assert text == "It has superseded messages with its coalesce key: the group's filter does not apply to it."
    assert why == 'Filter: region is "eu".'
    assert (tag, note) == ("not claimed yet", "")


def test_a_message_for_one_group_bypasses_the_filter(client):
    Sub(handler(filter=EU), handler(group="h", filter=EU))
    (offset,) = publish_from("us")
    QueueMessage.objects.update(target_group="g")
    _, text, why, _ = shown(client, offset)
    assert text == "The message is for this group only: the group's filter does not apply to it."
    assert why == 'Filter: region is "eu".'
    tag, text, why, _ = shown(client, offset, "h")
    assert (tag, text, why) == ("not for this group", "Only another group receives this message.", "")


def test_a_filter_that_cannot_be_parsed(client):
    Sub(handler())
    register(UNKNOWN)
    (offset,) = publish_from("eu")
    _, text, error, _ = shown(client, offset)
    assert text == "This release cannot parse the group's filter. Subscribers of this release claim no messages."
    assert "filter['region'][0]: there is no operator 'sounds-like'" in error


def test_values_of_the_metadata_require_the_permission(client, make_client, settings):
    Sub(handler(filter=EU))
    publish("t", 1, key="k", metadata={"region": "secret"})
    sequence()
    (offset,) = offsets_of()
    assert 'region is "secret"' in page(client, "message", offset=offset)
    _, text, why, _ = shown(make_client("view_dashboard"), offset)
    assert text.startswith("The group's filter does not match the message.")
    assert why == 'Filter: region is "eu".'
    assert "secret" not in page(make_client("view_dashboard"), "message", offset=offset)
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_filters.redact"}
    assert "secret" not in page(client, "message", offset=offset)
    assert shown(client, offset)[2] == 'Filter: region is "eu".'


def redact(text, *, topic, kind):
    return text.replace("secret", "***")


def test_a_redaction_that_changes_nothing_hides_nothing(client, settings):
    Sub(handler(filter=EU))
    (offset,) = publish_from("us")
    settings.MYSQLQUEUE = {"REDACT": "tests.admin.test_filters.redact"}
    assert shown(client, offset)[2] == WHY


def test_hostile_filters_stay_text(client):
    Sub(handler(filter=parse({HOSTILE: [HOSTILE]})))
    (offset,) = publish_from(HOSTILE)
    for name, query in (("message", {"offset": offset}), ("group", {"group": "g", "topic": "t"})):
        raw = client.get(f"{ROOT}{name}/", query).content.decode()
        assert "<script>alert" not in raw
        assert "&lt;script&gt;" in raw


def test_filters_cost_no_query(client):
    sub = Sub(handler())
    (offset,) = publish_from("us")
    sub.settle()

    def queries():
        with CaptureQueriesContext(connection) as captured:
            page(client, "message", offset=offset)
            page(client)
        return len(captured)

    before = queries()
    register(EU.as_json())
    assert queries() == before


# -- the pages of the queue and of a group ------------------------------------


def passed():
    sub = Sub(handler(filter=EU))
    publish_from(*["us"] * 3, "eu")
    sub.settle()
    rollups.add(USING, {one.ref: one.counts.read() for one in sub.poller.groups})


def test_the_overview_counts_messages_that_are_passed(client):
    sub = Sub(handler(group="h"))
    assert " filtered" not in page(client)
    passed()
    sub.settle()
    text = page(client)
    assert text.count(">3 filtered<") == 2, "under the chart, and in the row of the group"
    assert client.get(ROOT).context["totals"][0] == "1"


def test_the_page_of_a_group_has_its_filter_for_people(client, no_handlers):
    passed()
    text = page(client, "group", group="g", topic="t")
    assert 'filter: region is "eu" · 3 filtered in the last 30 minutes' in text
    ConsumerGroup.objects.update(filter={}, limits={"rate": "5/s"})
    text = page(client, "group", group="g", topic="t")
    assert "filter: " not in text
    assert "settled without a call in the last 30 minutes: 3 filtered" in text  # of the filter before
    assert "limits: 5/s" in text


def test_the_options_of_a_group_show_where_the_filter_comes_from(client, no_handlers):
    subscriber("t", group="g", filter={"region": ["eu"]})(handle)
    register_groups(USING)

    def options():
        answer = client.get(f"{ROOT}group/", {"group": "g", "topic": "t"})
        return {one.name: one for one in (*answer.context["changed"], *answer.context["unchanged"])}

    one = options()["filter"]
    assert (one.text, one.origin, one.refused) == ('{"region": ["eu"]}', "@subscriber", False)
    register(UNKNOWN)
    one = options()["filter"]
    assert (one.text, one.refused) == (json.dumps(UNKNOWN), True)
    text = page(client, "group", group="g", topic="t")
    assert "filter: cannot be parsed by this release · 0 filtered in" in text
    assert ">cannot be parsed</span> filter=" in text
    told = confirm(client, "override", group="g", topic="t", option="filter", value='{"region": ["us"]}')
    assert told[0].startswith('filter is {"region": ["us"]} now, instead of')
    one = options()["filter"]
    assert (one.text, one.refused) == ('{"region": ["us"]}', False)
    assert 'filter: region is "us"' in page(client, "group", group="g", topic="t")
    told = confirm(client, "override", group="g", topic="t", option="filter", value="none")
    assert told[0].startswith("filter is none now")
    told = confirm(client, "restore", group="g", topic="t", option="filter")
    assert told[0].startswith("filter is no longer overridden")


def test_a_form_refuses_a_filter_with_the_rule(client, no_handlers):
    subscriber("t", group="g")(handle)
    register_groups(USING)
    for value, says in (
        ("region=eu", 'must be JSON such as {"region": ["eu"]}'),
        ('{"region": "eu"}', "filter['region']: must be a list of values"),
    ):
        answer = client.post(
            f"{ROOT}do/override/", {"group": "g", "topic": "t", "option": "filter", "value": value, "asked": "yes"}
        )
        assert says in answer.context["refusal"]
    long = {"region": [f"region-{n}" for n in range(300)]}
    confirm(client, "override", group="g", topic="t", option="filter", value=json.dumps(long))
    assert parse(long).as_json() == ConsumerGroup.objects.get().overrides["filter"]["value"]
    assert OPERATIONS["override"].form.base_fields["value"].widget.attrs["rows"] == 2


def test_a_problem_links_to_the_group(client):
    Sub(handler())
    register(UNKNOWN)
    text = page(client)
    assert 'data-kind="filter"' in text
    assert "Subscribers of this release claim nothing for g/t" in text
