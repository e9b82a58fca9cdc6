"""The figures that pages of the dashboard show, as texts."""

from __future__ import annotations

import re
from collections import defaultdict
from html.parser import HTMLParser
from typing import Any

from django.test import Client

from tests.support.dashboard import ROOT
from tests.support.queue_states import Problem

LENGTHS = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86_400}
SIZES = {"byte": 1, "bytes": 1, "KB": 2**10, "MB": 2**20}


class Shown(str):
    """A figure as a text: a count, a length of time, a size, or ``-``."""

    tolerance = 0.05
    """Of a size."""

    def agrees(self, true: Any) -> bool:
        if isinstance(true, tuple):
            parts = self.split(",")
            return len(parts) == len(true) and all(
                Shown(one).agrees(each) for one, each in zip(parts, true, strict=True)
            )
        text = self.replace("\N{NO-BREAK SPACE}", " ").strip()
        if text in ("-", ""):
            return true is None
        if true is None or isinstance(true, str):
            return text == true
        about, text = text.startswith("≈ "), text.removeprefix("≈ ")
        if found := re.fullmatch(r"([\d,]+)(\+?)(?: \(.+ ago\))?", text):
            number, bound = int(found[1].replace(",", "")), bool(found[2])
            # Documented: a bound is reached, and the server's statistics can be off by half.
            return 1000 <= number <= true if bound else abs(number - true) <= true / 2 if about else number == true
        units = SIZES if re.search("[bB]", text) else LENGTHS
        parts = re.findall(r"([\d.]+) ([a-zA-Z]+)", text.removesuffix(" or more"))
        value = sum(float(number) * units[unit] for number, unit in parts)
        if text.endswith(" or more"):
            return 0 < value <= true
        return bool(parts) and abs(value - true) <= max(0.51, true * (self.tolerance if about else 0.022))


class Estimate(Shown):
    """A size that follows from the server's statistics."""

    tolerance = 0.5


class Page(HTMLParser):
    """Tables, cards and problems of a page. A cell is named after its column; that of a row's header, ``th``."""

    TAGS = ("td", "th", "dt", "dd", "h2", "p", "span", "summary", "title")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
        self.cards: dict[str, str] = {}
        self.headings: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.causes: list[dict[str, str]] = []
        self.facts = ""
        self._section, self._name = "", ""
        self._tables: list[str] = []
        self._into: list[tuple[dict[str, str], str]] = [({}, "")]
        self.feed(text)
        self.tables = defaultdict(
            list, {name: [row for row in rows if "th" in row] for name, rows in self.tables.items()}
        )

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        css = given.get("class", "")
        if tag == "section":
            self._section = given["aria-labelledby"]
        elif tag == "table":
            self._tables.append("mq-keys" if "mq-keys" in css else self._section)
        elif tag == "tr":
            self.tables[self._tables[-1]].append({})
        elif tag == "li" and "data-kind" in given:
            severity = int(css.removeprefix("mq-severity-"))
            self.problems.append(Problem(severity, given["data-kind"], given["data-group"]))
        elif tag == "br":
            self.handle_data(" ")
        if tag in self.TAGS:
            self._into.append(self._target(tag, css, given))

    def _target(self, tag: str, css: str, given: dict[str, str]) -> tuple[dict[str, str], str]:
        if tag in ("td", "th"):
            row = self.tables[self._tables[-1]][-1]
            name = "th" if given.get("scope") == "row" else given.get("data-label") or str(len(row))
            return ({}, "") if given.get("scope") == "col" else (row, name)
        if tag == "summary":
            return self._into[-1][0], "summary"
        if tag == "dt":
            self._name = ""
            return self.__dict__, "_name"
        if tag == "h2":
            return self.headings, self._section
        if css == "mq-what":
            self.causes.append({})
        if css in ("mq-what", "mq-cause-error", "mq-cause-facts"):
            return self.causes[-1], css
        if tag == "title":
            return {}, ""
        if css == "mq-facts":
            return self.__dict__, "facts"
        return (self.cards, self._name) if tag == "dd" else self._into[-1]

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self._tables.pop()
        elif tag in self.TAGS:
            self._into.pop()

    def handle_data(self, data: str) -> None:
        into, name = self._into[-1]
        into[name] = into.get(name, "") + (data if data.strip() else " ")


def opened(client: Client, name: str = "", **query: object) -> Page:
    answer = client.get(ROOT + (f"{name}/" if name else ""), query)
    assert answer.status_code == 200, answer.content.decode()
    return Page(answer.content.decode())
