"""The alert rules and the Grafana dashboard of the documents: promtool accepts them, and what they name is exported."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections import defaultdict
from types import SimpleNamespace

import pytest
import yaml
from django.test import Client
from prometheus_client import CollectorRegistry

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.metrics.process import serve
from django_mysqlqueue.metrics.queue import FAMILIES
from django_mysqlqueue.models import Reader
from tests.app import jobs
from tests.metrics.test_view import TOKEN
from tests.support import job_worlds
from tests.support.documents import DOCS
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import heartbeats, registry
from tests.support.metrics import free_ports, parsed, read
from tests.support.paths import ROOT
from tools import servers

pytestmark = [pytest.mark.any_engine, pytest.mark.any_version]

ALERTS = DOCS / "monitoring" / "alerts.yml"
UNIT_TESTS = ROOT / "tests" / "metrics" / "alerts_test.yml"
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
BOARD = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
VARIABLES = [one for one in BOARD["templating"]["list"] if one["type"] == "query"]
TARGETS = {"queue": "shop:443", "subscribers": "worker-1:9100"}
"""What Prometheus scrapes: job → instance. It adds these labels, and the metric ``up``."""
GROUPING = r"\bby\s*\(([^)]*)\)"
OPERATORS = {"and", "or", "unless"}


@pytest.fixture(scope="module")
def promtool():
    try:
        path = servers.promtool()
    except servers.NotAvailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))

    def run(*arguments, given=None):
        done = subprocess.run([path, *arguments], input=given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def work(delivery):
    match delivery.payload:
        case "reject":
            delivery.reject("never")
        case "fail":
            raise ValueError("broken")


@pytest.fixture
def expositions(queue_db, no_handlers, settings):
    """What the view and a subscriber serve to Prometheus after some messages and jobs: by job, the text."""
    settings.ROOT_URLCONF = "tests.metrics.test_view"
    settings.TASKS = job_worlds.TASKS
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN, "TOPICS": {"far": {"DATABASE": "queue"}}}
    sub = Sub(handler("orders", "billing", work, max_attempts=2), registry.handlers()[job_worlds.JOBS])
    stop = serve(SimpleNamespace(workers=[sub]), "127.0.0.1", port := free_ports(1), CollectorRegistry())
    try:
        publish_many("orders", [Message(text) for text in ("ack", "reject", "fail")])
        publish("orders", "later", delay=60)
        publish("far", 1, via=USING)
        Reader.objects.create(name="archive", read_offset=0)
        jobs.add.enqueue(1)
        sub.settle()
        jobs.add.enqueue(2)
        sequence()
        sub.poller.look_now()
        sub.step(times=2)
        heartbeats.beat(USING, sub.name, list(sub.handlers), {"host": "h"}, sub.progress.facts())
        response = Client().get("/metrics/", headers={"Authorization": f"Bearer {TOKEN}"})
        assert response.status_code == 200
        return {"queue": response.content.decode(), "subscribers": read(port)}
    finally:
        stop()


@pytest.fixture
def samples(expositions):
    """What Prometheus stores of that: (name, labels, value)."""
    found = [("up", {"job": job, "instance": instance}, 1.0) for job, instance in TARGETS.items()]
    for job, text in expositions.items():
        for (name, labels), value in parsed(text).items():
            found.append((name, {**dict(labels), "job": job, "instance": TARGETS[job]}, value))
    return found


def filled(query):
    """A query of the dashboard, for all values of its variables."""
    assert set(re.findall(r"\$(\w+)", query)) <= {"__rate_interval", *(one["name"] for one in VARIABLES)}, query
    return re.sub(r"\$(?!__)\w+", ".+", query.replace("$__rate_interval", "5m"))


def board_queries():
    """(query, text for people) of each target of a panel."""
    return [(filled(one["expr"]), one["legendFormat"]) for panel in PANELS for one in panel["targets"]]


def queries():
    """(query, texts for people) of each rule, panel and variable."""
    yield from ((rule["expr"], " ".join(rule["annotations"].values())) for rule in RULES)
    yield from board_queries()
    for one in VARIABLES:
        metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", one["query"]).groups()
        yield f"sum by ({label}) ({filled(metric)})", ""


def selectors(query):
    """(name, matchers as text) of each selector."""
    rest = re.sub(r"\[[^]]*\]", "", re.sub(GROUPING, "", query))
    found = re.findall(r"(?<![\w.])([a-zA-Z_:][\w:]*)(?![\w:]|\s*\()(?:\{([^}]*)\})?", rest)
    return [(name, matchers) for name, matchers in found if name not in OPERATORS]


def test_every_metric_and_label_is_exported(samples):
    values = defaultdict(lambda: defaultdict(set))
    for name, labels, _ in samples:
        for label, value in labels.items():
            values[name][label].add(value)
    seen = set()
    for query, texts in queries():
        grouped = {label.strip() for labels in re.findall(GROUPING, query) for label in labels.split(",")}
        named = set(re.findall(r"\$labels\.(\w+)|\{\{(\w+)\}\}", texts))
        for name, matchers in selectors(query):
            known = values[name]
            assert known, (name, query)
            assert grouped <= set(known), (grouped, name, query)
            assert {label for label in itertools.chain(*named) if label} <= (grouped or set(known)), (texts, query)
            taken = re.findall(r'(\w+)\s*(=~|!=|=)\s*"([^"]*)"', matchers)
            assert len(taken) == matchers.count('"') / 2, matchers
            for label, operator, value in taken:
                assert label in known, (label, query)
                for one in value.split("|") if operator == "=~" and value != ".+" else [value]:
                    assert operator == "!=" or any(re.fullmatch(one, each) for each in known[label]), (one, query)
            seen.add(name)
    assert len(seen) > 20
    assert {name.removeprefix("mysqlqueue_").removesuffix("_total") for name, *_ in samples} >= set(FAMILIES) - {
        "bell_age_seconds"
    }


def test_series_of_the_unit_tests_are_exported(samples):
    exported = defaultdict(list)
    for name, labels, _ in samples:
        exported[name].append(set(labels) | {"job", "instance"})
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        for one in test["input_series"]:
            name, labels = re.fullmatch(r"(\w+)\{(.*)\}", one["series"]).groups()
            given = set(re.findall(r'(\w+)="', labels))
            assert given | {"job", "instance"} in exported[name], one


def test_the_expositions_have_no_faults(promtool, expositions):
    for text in expositions.values():
        promtool("check", "metrics", given=text)


def test_the_rules_are_valid(promtool):
    promtool("check", "rules", str(ALERTS))


def test_the_unit_tests_of_the_rules_pass(promtool):
    promtool("test", "rules", str(UNIT_TESTS))


def test_each_alert_fires_in_the_unit_tests():
    fired = set()
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        assert any("exp_samples" not in one for one in test["promql_expr_test"]), "nor too early"
        for one in test["promql_expr_test"]:
            for sample in one.get("exp_samples", ()):
                fired.add(tuple(re.search(rf'{label}="(\w+)"', sample["labels"])[1] for label in ("name", "severity")))
    assert fired == {(rule["alert"], rule["labels"]["severity"]) for rule in RULES}


def test_every_panel_shows_something(promtool, samples, tmp_path):
    """Of what a scrape returns: a query in which a label or a value is wrong returns nothing."""
    series = [
        {
            "series": f"{name}{{{','.join(f'{label}={json.dumps(text)}' for label, text in labels.items())}}}",
            "values": f"{value}+0x20",
        }
        for name, labels, value in samples
    ]
    tests = [
        {"expr": f"count({query}) > bool 0", "eval_time": "20m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for query, _ in board_queries()
    ]
    path = tmp_path / "panels.yml"
    test = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", str(path))


def test_the_dashboard_can_be_imported():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert {one["name"] for one in BOARD["templating"]["list"]} == {"datasource", "database", "topic", "group"}
    assert BOARD["schemaVersion"] >= 36, "panels name their data source by type and uid"
    taken = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for one in [*PANELS, *VARIABLES]:
        assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_descriptions_name_the_next_step():
    for rule in RULES:
        assert re.search(r"`python manage.py \w+|on the dashboard", rule["annotations"]["description"]), rule["alert"]


def test_the_guide_lists_every_alert():
    page = (DOCS / "howto" / "observe.md").read_text()
    listed = re.findall(r"^\| `(Queue\w+)` \| ([a-z, ]+) \|", page, re.MULTILINE)
    severities = defaultdict(list)
    for rule in RULES:
        severities[rule["alert"]].append(rule["labels"]["severity"])
    assert listed == [(name, ", ".join(found)) for name, found in severities.items()]
