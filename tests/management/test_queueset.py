"""``queueset``: lists, sets and removes overrides."""

from __future__ import annotations

import io
import json
import re

import pytest
from django.core.management import CommandError, call_command

from django_mysqlqueue import subscriber
from django_mysqlqueue.filter_policies import parse
from django_mysqlqueue.models import ConsumerGroup, Operation
from django_mysqlqueue.options.delivery_limits import LIMIT_OPTIONS
from tests.support.harness import USING
from tests.support.internals import GroupRef, groups

WAITS = "initial=2s,factor=2,maximum=3600s,jitter=0"


@pytest.fixture
def registered(db, no_handlers):
    groups.register(USING, GroupRef("g", "t"), mode="ordered", start="earliest")
    groups.register(USING, GroupRef("h", "t"), mode="ordered", start="earliest")
    subscriber("t", group="g", max_attempts=4)(lambda delivery: None)


def run(*arguments):
    out = io.StringIO()
    call_command("queueset", *arguments, stdout=out, no_color=True)
    return out.getvalue()


def test_it_sets_lists_and_unsets(registered):
    assert run() == "No options are overridden.\n"
    said = run("g", "t", "max_attempts=9", "backoff=initial=2s,jitter=0", "--noinput", "--reason", "slow")
    assert said.splitlines()[-3:] == [
        "max_attempts is 9 now, instead of 4 (@subscriber).",
        f"backoff is {WAITS} now, instead of initial=1s,factor=2,maximum=3600s,jitter=0.2 (default).",
        "The subscribers of the group g/t notice within 10 seconds.",
    ]
    operation = Operation.objects.get()
    assert (operation.action, operation.reason) == ("settings", "slow")
    lines = [line.split(maxsplit=2) for line in run("g", "t").splitlines()]
    assert [line[0] for line in lines] == [
        "option",
        "claim_size",
        "prefetch",
        "priority_share",
        "poll_interval",
        "max_poll_interval",
        "max_attempts",
        "backoff",
        *LIMIT_OPTIONS,
        "filter",
        "allowed_users",
    ]
    assert lines[1] == ["claim_size", "100", "default"]
    name, value, origin = lines[6]
    assert (name, value) == ("max_attempts", "9")
    assert origin.startswith("overridden at 20")
    assert origin.endswith(f" by {operation.actor}, otherwise 4 (@subscriber)")
    assert run("--list") == run()
    assert [line.split()[:4] for line in run().splitlines()[1:]] == [
        ["g", "t", "max_attempts", "9"],
        ["g", "t", "backoff", WAITS],
    ]
    run("g", "t", "--unset", "max_attempts", "--unset", "backoff", "--noinput")
    assert run() == "No options are overridden.\n"


def test_json(registered):
    found = json.loads(run("g", "t", "max_attempts=none", "--noinput", "--format", "json"))
    assert (found["operation"], found["changed"]) == ("settings", 1)
    (one,) = json.loads(run("--format", "json"))["options"]
    override = one.pop("override")
    assert override["value"] is None
    assert override["at"] > 10**12
    assert "@" in override["by"]
    assert one == {
        "group": "g",
        "topic": "t",
        "option": "max_attempts",
        "value": None,
        "code_value": 4,
        "registered": 4,
        "source": "@subscriber",
        "ignored": "",
    }


def test_an_override_that_is_ignored_says_why(registered):
    ConsumerGroup.objects.update(overrides={"timeout": {"value": 5, "at": 1000, "by": "bob"}})
    assert "by bob is ignored: timeout=5 requires an async handler" in run("g", "t")


def test_options_may_stand_between_the_arguments(registered):
    run("g", "t", "--reason", "slow", "prefetch=5", "--noinput", "claim_size=5")
    run("g", "--unset", "prefetch", "t", "--noinput", "claim_size=6")
    assert {name: one["value"] for name, one in ConsumerGroup.objects.get(consumer_group="g").overrides.items()} == {
        "claim_size": 6
    }


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--unset", "claim_size"], "To change options, pass the group and its topic: GROUP TOPIC."),
        (["g", "t", "--unset", "max_attempt"], "is not overridden. Did you mean max_attempts?"),
        (["g"], "Pass the topic, too: GROUP TOPIC."),
        (["g", "t", "max_attempts"], "'max_attempts': must be OPTION=VALUE."),
        (["g", "t", "max_attempts=x"], "max_attempts='x': must be an integer"),
        (["g", "t", "colour=x"], "there is no option 'colour'. Options: claim_size"),
        (["g", "t", "max_attempts=5", "max_attempts=6"], "max_attempts: is given twice"),
        (["g", "t", "max_attempts=5", "--list"], "--list cannot be combined with OPTION=VALUE or --unset."),
        (["x", "t"], "There is no group 'x' on topic 't'. Registered: g on t, h on t."),
        (["x", "t", "max_attempts=5"], "There is no group 'x' on topic 't'."),
        (
            ["g", "t", "--unset", "max_attempts"],
            "max_attempts of the group g/t is not overridden.",
        ),
    ],
)
def test_it_is_refused_with_the_rule(registered, arguments, says):
    with pytest.raises(CommandError) as caught:
        run(*arguments, *(["--noinput"] if len(arguments) > 2 else []))
    assert says in str(caught.value)
    assert not Operation.objects.exists()


def test_queuestatus_lists_what_is_overridden(registered):
    out = io.StringIO()
    call_command("queuestatus", "--all", stdout=out, no_color=True)
    assert "Overridden" not in out.getvalue()
    run("g", "t", "max_attempts=9", "--noinput")
    out = io.StringIO()
    call_command("queuestatus", "--all", stdout=out, no_color=True)
    lines = out.getvalue().splitlines()
    place = lines.index("Overridden options")
    assert lines[place + 1].split() == ["group", "topic", "option", "value", "since", "by"]
    assert lines[place + 2].split()[:4] == ["g", "t", "max_attempts", "9"]
    out = io.StringIO()
    call_command("queuestatus", "--format", "json", stdout=out)
    found = {one["group"]: one["overrides"] for one in json.loads(out.getvalue())["groups"]}
    assert found["h"] == {}
    assert found["g"]["max_attempts"]["value"] == 9


def test_a_registered_limit_that_is_not_the_codes_is_told(registered):
    ConsumerGroup.objects.update(limits={"rate": "5/s"})
    lines = {line.split(maxsplit=1)[0]: line.split(maxsplit=2)[1:] for line in run("g", "t").splitlines()}
    assert lines["rate"] == ["5/s", "registered; default says none"]
    assert run("g", "t", "rate=9/m", "--noinput").splitlines()[-2] == (
        "rate is 9/m now, instead of 5/s (registered; default says none)."
    )
    (line,) = [line for line in run("g", "t").splitlines() if line.strip().startswith("rate ")]
    assert "overridden" in line
    assert line.endswith("otherwise 5/s (registered; default says none)")


def test_filters(registered):
    said = run("g", "t", 'filter={"region": ["eu"]}', "--noinput")
    assert said.splitlines()[-2] == 'filter is {"region": ["eu"]} now, instead of none (default).'
    assert ConsumerGroup.objects.get(consumer_group="g").overrides["filter"]["value"] == {"region": ["eu"]}
    long = {"region": [f"region-{n}" for n in range(20)]}
    run("g", "t", f"filter={json.dumps(long)}", "--noinput")
    *_, (line,), last = _paragraphs(run("g", "t"))
    assert re.split(r" {2,}", line)[1].endswith("…")
    assert json.loads(last[0].removeprefix("filter=")) == parse(long).as_json()
    assert max(map(len, run().splitlines())) < 200
    run("g", "t", "filter=none", "--noinput")
    assert ConsumerGroup.objects.get(consumer_group="g").overrides["filter"]["value"] is None
    for value, says in (
        ("region=eu", 'filter=\'region=eu\': must be JSON such as {"region": ["eu"]}'),
        ('{"region": "eu"}', "filter['region']: must be a list of values or a dict of nested keys"),
    ):
        with pytest.raises(CommandError) as caught:
            run("g", "t", f"filter={value}", "--noinput")
        assert says in str(caught.value)


def _paragraphs(text):
    """The lines about the filter, and what follows."""
    lines = text.splitlines()
    place = next(n for n, line in enumerate(lines) if line.strip().startswith("filter "))
    return [[lines[place].strip()], lines[place + 3 :]]


def test_a_filter_that_cannot_be_parsed_is_not_called_ignored(registered):
    unknown = {"region": [{"sounds-like": "eu"}]}
    ConsumerGroup.objects.filter(consumer_group="g").update(filter=unknown)
    (line,), _ = _paragraphs(run("g", "t"))
    name, value, origin = re.split(r" {2,}", line)
    assert (name, value) == ("filter", json.dumps(unknown))
    assert origin.startswith("registered; default says none; subscribers claim nothing: filter=")
    assert "there is no operator 'sounds-like'" in line
    run("g", "t", 'filter={"region": ["eu"]}', "--noinput")
    (line,), _ = _paragraphs(run("g", "t"))
    assert "claim nothing" not in line
    assert "ignored" not in line
    ConsumerGroup.objects.update(overrides={"filter": {"value": unknown, "at": 1000, "by": "ops"}})
    (line,), _ = _paragraphs(run("g", "t"))
    assert "by ops; subscribers claim nothing: filter=" in line
    assert "ignored" not in line


def test_of_a_group_without_a_handler_the_registered_options_are_listed(registered):
    groups.register_options(USING, GroupRef("h", "t"), "limits", {"rate": "5/s"}, actor="migrate")
    groups.register_options(USING, GroupRef("h", "t"), "filter", {"region": ["eu"]}, actor="migrate")
    run("h", "t", "max_attempts=7", "--noinput")
    lines = [line.split(maxsplit=2) for line in run("h", "t").splitlines()]
    assert [line[:2] for line in lines[1:]] == [["max_attempts", "7"], ["rate", "5/s"], ["filter", '{"region":']]
    assert lines[1][2].startswith("overridden at ")
    assert lines[2][2] == "registered"
    said = run("h", "t", "rate=9/s", "--noinput").splitlines()[-2]
    assert said == "rate is 9/s now, instead of 5/s (registered)."
    assert run("h", "t").splitlines()[2].endswith(", otherwise 5/s (registered)")


def test_limits_that_have_no_effect_are_refused_without_a_handler(registered):
    with pytest.raises(CommandError, match="burst=3 requires rate or rate_per_key"):
        run("h", "t", "burst=3", "--noinput")
    groups.register_options(USING, GroupRef("h", "t"), "limits", {"rate": "5/s"}, actor="migrate")
    run("h", "t", "burst=3", "--noinput")
    assert set(ConsumerGroup.objects.get(consumer_group="h").overrides) == {"burst"}
    run("h", "t", "rate=9/s", "--noinput")
    groups.register_options(USING, GroupRef("h", "t"), "limits", {}, actor="migrate")
    with pytest.raises(CommandError, match="burst=3 requires rate or rate_per_key"):
        run("h", "t", "--unset", "rate", "--noinput")
