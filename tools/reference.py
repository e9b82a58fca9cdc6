#!/usr/bin/env python3
"""Write the API reference: signatures and docstrings, as Markdown, in the pages of docs/.

    python tools/reference.py            rewrite the generated regions of the pages
    python tools/reference.py --check    change nothing; print a diff and exit with 1 if a page is out of date

A region is delimited by two comments, which name the object to describe:

    <!-- generated: django_mysqlqueue.publish -->
    <!-- end -->

Its headings are one level below the heading above it. The region ``layers`` shows the layers of the package, from the
contract of import-linter in pyproject.toml; the region ``options`` the table of options. The text outside of regions is
written by hand. griffe parses the source without importing it, so the result does not depend on the versions of Python
and Django. The exit status is also 1 if a docstring does not match its signature; the pages are written nevertheless.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import logging
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "django_mysqlqueue"
SPARK_PACKAGE = "pyspark_mysqlqueue"
REGION = re.compile(r"^<!-- generated: (\S+) -->\n(?:(?!^<!-- generated:).)*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
LINE = 88
"""Maximum length of a line of code, as in docs/ruff.toml."""
TEXT = 110
"""Maximum length of a line of an argument's text that is not in a docstring."""
LAYERS = "layers"
"""Name of the region with the drawing of the layers."""
OPTIONS = "options"
"""Name of the region with the options of a group."""
Documented = griffe.Function | griffe.Class | griffe.Attribute


class Fault(Exception):
    """A page or a docstring is invalid. The message names the place."""


class _Warnings(logging.Handler):
    """Collects griffe's warnings about docstrings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() not in self.texts:
            self.texts.append(record.getMessage())


@dataclass(frozen=True)
class Place:
    """The page and the anchor of a description."""

    page: Path
    anchor: str


@dataclass(frozen=True)
class Source:
    """The parsed packages."""

    package: griffe.Module
    modules: griffe.ModulesCollection
    root: Path

    @classmethod
    def read(cls, root: Path) -> Source:
        loader = griffe.GriffeLoader(
            search_paths=[root, root / "spark"],
            allow_inspection=False,
            docstring_parser=griffe.Parser.google,
            docstring_options={
                "returns_multiple_items": False,
                "returns_named_value": False,
                "warn_missing_types": False,
            },
        )
        package = loader.load(PACKAGE, try_relative_path=False)
        if (root / "spark" / SPARK_PACKAGE).is_dir():
            loader.load(SPARK_PACKAGE, try_relative_path=False)
        loader.resolve_aliases()
        assert isinstance(package, griffe.Module)
        source = cls(package, loader.modules_collection, root)
        _spell_out_arguments(source, package)
        return source

    def find(self, path: str) -> griffe.Object | None:
        """Return the object with a dotted path, after imports are resolved; None if it is not in the packages."""
        if path.partition(".")[0] not in (PACKAGE, SPARK_PACKAGE):
            return None
        try:
            found = self.modules[path]
            return found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.AliasResolutionError):
            return None


def _spell_out_arguments(source: Source, module: griffe.Module) -> None:
    """Give functions the arguments that their decorators give them, ``@spelled_out`` and ``@arguments_of(…)``."""
    for member in module.members.values():
        if isinstance(member, griffe.Module):
            _spell_out_arguments(source, member)
        if not isinstance(member, griffe.Function):
            continue
        for decorator in map(str, (one.value for one in member.decorators)):
            if decorator == "spelled_out":
                _spell_out(source, member)
            elif found := re.fullmatch(r"arguments_of\((\w+)\)", decorator):
                member.parameters = module.functions[found[1]].parameters


def _spell_out(source: Source, function: griffe.Function) -> None:
    """Give a function that takes ``**…: Unpack[…]`` the arguments one by one, as ``@spelled_out`` does.

    Their texts are those of the type, unless the docstring of the function has its own.
    """
    several = function.parameters[-1]
    annotation: Any = several.annotation
    arguments = source.find(annotation.slice.canonical_path)
    if not isinstance(arguments, griffe.Class):
        raise Fault(f"{function.path}: {annotation} is not a type of this package")
    shared = dict(_annotated(arguments))
    del function.parameters[several.name]
    for name, (kind, _text, default) in shared.items():
        kinds = griffe.ParameterKind
        function.parameters.add(griffe.Parameter(name, annotation=kind, kind=kinds.keyword_only, default=default))
    places = [parameter.name for parameter in function.parameters]
    for section in _parsed(function):
        if section.kind is griffe.DocstringSectionKind.parameters:
            written = {one.name for one in section.value}
            section.value += [
                griffe.DocstringParameter(name, description=textwrap.fill(text, TEXT))
                for name, (_kind, text, _default) in shared.items()
                if name not in written
            ]
            section.value.sort(key=lambda one: places.index(one.name) if one.name in places else -1)


def _annotated(shared: griffe.Class) -> Iterator[tuple[str, tuple[Any, str, str | griffe.Expr | None]]]:
    """Yield the type, the text and the default of each argument that a ``TypedDict`` has, with those of its bases."""
    for base in shared.resolved_bases:
        if isinstance(base, griffe.Class):
            yield from _annotated(base)
    for member in shared.attributes.values():
        annotation: Any = member.annotation
        is_required = str(annotation).startswith("Required[")
        kind, text, *default = (annotation.slice if is_required else annotation).slice.elements
        given = None if is_required else default[0] if default else "None"
        yield member.name, (kind, ast.literal_eval(str(text)), given)


@dataclass(frozen=True)
class GroupOption:
    """A record of the table of options."""

    name: str
    owner: str
    """The class that declares it."""
    type: griffe.Expr
    record: dict[str, str]
    """The arguments of ``Option``, as they stand in the source."""
    text: str

    def has(self, argument: str) -> bool:
        return argument in self.record


def options(source: Source) -> Iterator[GroupOption]:
    """Yield the options of a group, as ``options/table.py`` declares them."""
    table = source.package["options.table"]
    for owner in ("SubscriberOptions", "BatchOptions", "GroupOptions"):
        for member in table.members[owner].members.values():
            annotation: Any = member.annotation
            kind, call = annotation.slice.elements
            record = {argument.name: str(argument.value).replace('"', "'") for argument in call.arguments}
            yield GroupOption(member.name, owner, kind, record, member.docstring.value)


@dataclass
class Index:
    """The names that the reference describes, and their places."""

    places: dict[str, Place] = field(default_factory=dict)

    def add(self, name: str, described: Documented, page: Path) -> None:
        if name in self.places:
            raise Fault(f"{page}: {name} is described in {self.places[name].page} already")
        self.places[name] = place = Place(page, slug(title(described)))
        short = name.rpartition(".")[2]
        # A function of a submodule may have the name of an argument, for example "delivery" or "groups".
        if not isinstance(described, griffe.Class) and name != f"{PACKAGE}.{short}":
            return
        self.places.setdefault(short, place)
        for method in methods(described):
            self.places.setdefault(f"{short}.{method.name}", Place(page, slug(title(method))))

    def link(self, name: str, page: Path) -> str | None:
        """Return the target of a link from a page to a name; None if the name is not described."""
        place = self.places.get(name)
        if place is None:
            return None
        return ("" if place.page == page else os.path.relpath(place.page, page.parent)) + f"#{place.anchor}"


def title(described: Documented) -> str:
    """Return the heading. Anchors are in lower case, so ``class`` distinguishes Published from published()."""
    if isinstance(described, griffe.Class):
        return f"{'exception' if _is_exception(described) else 'class'} `{described.name}`"
    if isinstance(described, griffe.Function):
        owner = f"{described.parent.name}." if isinstance(described.parent, griffe.Class) else ""
        return f"`{owner}{described.name}()`"
    return f"`{described.name}`"


def _is_exception(described: griffe.Class) -> bool:
    """Decide by the names of the bases, because built-in classes are not parsed."""
    if any(re.search(r"(Error|Exception)$", str(base)) for base in described.bases):
        return True
    return any(isinstance(base, griffe.Class) and _is_exception(base) for base in described.resolved_bases)


def slug(heading: str) -> str:
    """Return the anchor of a heading, in the form of code hosts and MyST."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def methods(described: Documented) -> list[griffe.Function]:
    """Return the methods to describe: public ones with a docstring."""
    members = described.members.values() if isinstance(described, griffe.Class) else ()
    return [one for one in members if isinstance(one, griffe.Function) and one.docstring and one.name[0] != "_"]


@dataclass(frozen=True)
class Writer:
    """Writes the description of an object on a page."""

    source: Source
    index: Index
    page: Path
    name: str
    level: int

    def write(self, described: Documented) -> str:
        module, _, name = self.name.rpartition(".")
        parts = [self._heading(described, self.level), self._block(described, f"# from {module} import {name}\n")]
        parts += self._sections(described)
        if isinstance(described, griffe.Class):
            attributes = list(self._attributes(described))
            if attributes:
                parts += ["**Attributes**", "\n".join(attributes)]
            for method in methods(described):
                parts.append(self._heading(method, self.level + 1))
                parts += [self._block(method), *self._sections(method)]
        return "\n\n".join(parts)

    @staticmethod
    def _heading(described: Documented, level: int) -> str:
        return f"{'#' * level} {title(described)}"

    def options(self) -> Iterator[str]:
        """Yield the list of a group's options, and the table of where each can be set and applies."""
        yield "\n".join(
            self._item([option.name], [self._code(option.type).replace("'", '"')], self._prose(option.text))
            for option in options(self.source)
        )
        yes = {False: "", True: "yes"}
        rows = [
            [
                f"`{option.name}`",
                f"`{option.name.upper()}`" if option.has("setting") else f"`{option.record.get('default', 'None')}`",
                yes[option.owner != "GroupOptions"],
                yes[option.name not in ("reject_on", "retry_on")],
                yes[option.has("registered")],
                yes[option.has("form")],
                {"'queue'": "the queue's", "'job'": "each job's"}.get(option.record.get("jobs", ""), ""),
                option.record.get("sql", "''").strip("'"),
            ]
            for option in options(self.source)
        ]
        head = ["Option", "Default", "Code", "`GROUPS`", "Registered", "`queueset`", "Jobs", "Plain SQL"]
        yield "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])

    # -- signatures ---------------------------------------------------------------

    def _block(self, described: Documented, first: str = "") -> str:
        """Return the signature as a Python block: a stub that compiles. The formatter wraps its lines."""
        if isinstance(described, griffe.Function):
            code = self._function(described)
        elif isinstance(described, griffe.Class):
            code = self._class(described)
        else:
            code = f"{described.name} = {described.value}"
        return f"```python\n{first}{code}\n```"

    def _function(self, function: griffe.Function) -> str:
        kinds = griffe.ParameterKind
        parameters: list[str] = []
        for last, parameter in zip([None, *function.parameters], function.parameters, strict=False):
            before = last.kind if last is not None else None
            if before is kinds.positional_only and parameter.kind is not before:
                parameters.append("/")
            if parameter.kind is kinds.keyword_only and before not in (kinds.keyword_only, kinds.var_positional):
                parameters.append("*")
            parameters.append(self._parameter(parameter))
        returns = f" -> {self._code(function.returns)}" if function.returns is not None else ""
        decorator = "".join(f"@{name}\n" for name in ("classmethod", "staticmethod") if name in function.labels)
        start = "async def" if "async" in function.labels else "def"
        line = f"{start} {function.name}({', '.join(parameters)}){returns}: ..."
        if len(line) > LINE:  # the comma makes the formatter put each parameter on its own line
            line = f"{start} {function.name}({', '.join(parameters)},){returns}: ..."
        return decorator + line

    def _parameter(self, parameter: griffe.Parameter) -> str:
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(
            parameter.kind or griffe.ParameterKind.positional_or_keyword, ""
        )
        text = f"{stars}{parameter.name}"
        if parameter.annotation is not None:
            text += f": {self._code(parameter.annotation)}"
        if parameter.default is not None and not stars:
            text += f" = {self._code(parameter.default)}"
        return text

    def _class(self, described: griffe.Class) -> str:
        """Return a class with its fields (a dataclass), or with its constructor (if the docstring has arguments)."""
        bases = ", ".join(self._code(base) for base in described.bases)
        head = f"class {described.name}" + (f"({bases})" if bases else "")
        if "dataclass" in described.labels:
            decorators = "".join(f"@{decorator.value}\n" for decorator in described.decorators)
            lines = [
                f"    {one.name}: {self._code(one.annotation)}"
                + (f" = {self._code(one.value)}" if one.value is not None else "")
                for one in described.members.values()
                if isinstance(one, griffe.Attribute) and one.name[0] != "_" and "instance-attribute" in one.labels
            ]
            return f"{decorators}{head}:\n" + "\n".join(lines or ["    ..."])
        constructor = described.members.get("__init__")
        kinds = {section.kind for section in _parsed(described)}
        if isinstance(constructor, griffe.Function) and griffe.DocstringSectionKind.parameters in kinds:
            return f"{head}:\n    {self._function(constructor)}"
        return f"{head}: ..."

    def _code(self, expression: str | griffe.Expr | None) -> str:
        """Return an expression as in the source, with type aliases and constants replaced by their values."""
        if expression is None or isinstance(expression, str):
            return expression or ""
        return "".join(
            part if isinstance(part, str) else self._name(part) if isinstance(part, griffe.ExprName) else str(part)
            for part in expression.iterate(flat=True)
        )

    def _name(self, name: griffe.ExprName) -> str:
        target = self.source.find(name.canonical_path)
        if not isinstance(target, griffe.Attribute) or not isinstance(target.parent, griffe.Module):
            return name.name
        if isinstance(target.value, griffe.ExprCall) or target.value is None:
            return "..."  # a sentinel for an argument that is not given
        return self._code(target.value)

    # -- texts --------------------------------------------------------------------

    def _sections(self, described: Documented) -> Iterator[str]:
        kinds = griffe.DocstringSectionKind
        for section in _parsed(described):
            value: Any = section.value
            if section.kind is kinds.text:
                yield self._prose(value)
            elif section.kind is kinds.parameters:
                yield "**Arguments**"
                yield "\n".join(self._item([one.name], (), self._prose(one.description)) for one in value)
            elif section.kind in (kinds.returns, kinds.yields):
                yield f"**{section.kind.value.title()}**"
                yield "\n".join(self._prose(self._returned(described, one)) for one in value)
            elif section.kind is kinds.raises:
                yield "**Raises**"
                yield "\n".join(
                    f"- {self._linked(f'`{one.annotation}`')}: {_nested(self._prose(one.description))}" for one in value
                )
            elif section.kind is kinds.admonition:
                yield f"**{section.title}**"
                yield self._prose(value.contents)
            elif section.kind is not kinds.attributes:
                raise Fault(f"{described.path}: the docstring has an unsupported section “{section.kind.value}”")

    @staticmethod
    def _returned(described: Documented, returned: griffe.DocstringReturn | griffe.DocstringYield) -> str:
        """Return the text, including a part before a colon, which the parser takes for a type."""
        first = returned.annotation
        known = str(
            described.returns if isinstance(described, griffe.Function) else getattr(described, "annotation", "")
        )
        if first is None or str(first) == known or known.endswith(f"[{first}]"):
            return returned.description
        return f"{first}: {returned.description}"

    def _attributes(self, described: griffe.Class) -> Iterator[str]:
        """Yield the attributes of the class docstring, then attributes and properties with their own docstring.

        Those of base classes come first, unless the page describes the base class too.
        """
        for base in described.resolved_bases:
            if isinstance(base, griffe.Class) and not (self.index.link(base.name, self.page) or "").startswith("#"):
                yield from self._attributes(base)
        listed: set[str] = set()
        for section in _parsed(described):
            if section.kind is griffe.DocstringSectionKind.attributes:
                for one in section.value:
                    # "a, b: …" describes two attributes.
                    several = f"{one.name} {one.annotation}" if one.name.endswith(",") else one.name
                    names = re.findall(r"\w+", several)
                    listed.update(names)
                    types = [self._type(described, name) for name in names]
                    yield self._item(names, types, self._prose(one.description))
        private = {name for name in described.members if name.startswith("_")}
        for member in described.members.values():
            if isinstance(member, griffe.Attribute) and member.docstring and member.name not in listed | private:
                text = "\n\n".join(self._sections(member))
                yield self._item([member.name], [self._type(described, member.name)], text)

    def _type(self, described: griffe.Class, name: str) -> str:
        member = described.members.get(name)
        if not isinstance(member, griffe.Attribute):
            return ""
        annotation = member.annotation
        if annotation is None:
            annotation = self._followed(described, member.value)
        return self._code(annotation).replace("'", '"')

    def _followed(self, described: griffe.Class, value: str | griffe.Expr | None) -> str | griffe.Expr | None:
        """Return the type of ``self.x = argument.a.b``, by following the types of the fields."""
        if isinstance(value, griffe.ExprBoolOp):
            value = next(iter(value.values))
        constructor = described.members.get("__init__")
        if not isinstance(value, (griffe.ExprAttribute, griffe.ExprName)) or not isinstance(
            constructor, griffe.Function
        ):
            return None
        first, *rest = str(value).split(".")
        annotation = constructor.parameters[first].annotation if first in constructor.parameters else None
        for part in rest:
            owner = self.source.find(annotation.canonical_path) if isinstance(annotation, griffe.Expr) else None
            member = owner.members.get(part) if owner is not None else None
            annotation = member.annotation if isinstance(member, griffe.Attribute) else None
        return annotation

    @staticmethod
    def _item(names: Iterable[str], types: Sequence[str], text: str) -> str:
        shown = ", ".join(f"`{name}`" for name in names)
        kinds = types[:1] if len(set(types)) == 1 else types
        kind = f" ({', '.join(f'`{one}`' for one in kinds)})" if any(kinds) else ""
        return f"- {shown}{kind}{f': {_nested(text)}' if text else ''}"

    def _prose(self, text: str) -> str:
        """Return a docstring's text as Markdown, with `code`, with links to described names, and with HTML escaped."""
        text = re.sub(r"``(.+?)``", r"`\1`", text.strip(), flags=re.DOTALL)
        pieces = re.split(r"(`[^`]+`)", text)
        return "".join(
            self._linked(piece) if piece.startswith("`") else re.sub(r"<(?=[A-Za-z/!])", r"\\<", piece)
            for piece in pieces
        )

    def _linked(self, code: str) -> str:
        name = code.strip("`").removesuffix("()")
        target = self.index.link(name, self.page)
        if target is None or self.index.places[name] == self.index.places.get(self.name):
            return code
        return f"[{code}]({target})"


def _nested(text: str) -> str:
    """Indent a text as a part of a list item."""
    return textwrap.indent(text, "  ").removeprefix("  ")


def _parsed(described: Documented) -> list[griffe.DocstringSection]:
    return described.docstring.parsed if described.docstring else []


# -- pages ------------------------------------------------------------------------


def pages(docs: Path, source: Source) -> dict[Path, tuple[str, str]]:
    """Return each page with regions: its current text and its new text.

    Raises:
        Fault: A page or a docstring is invalid.
    """
    texts = {page: text for page in sorted(docs.rglob("*.md")) if "<!-- generated:" in (text := page.read_text())}
    index = Index()
    for page, text in texts.items():
        regions = REGION.findall(text)
        if not len(regions) == text.count("<!-- generated:") == text.count("<!-- end -->"):
            raise Fault(f"{page}: a region is not delimited by <!-- generated: name --> and <!-- end --> lines")
        for name in regions:
            if name in (LAYERS, OPTIONS):
                continue
            index.add(name, _described(source, name, page), page)
    return {page: (text, _rewritten(page, text, source, index)) for page, text in texts.items()}


def _described(source: Source, name: str, page: Path) -> Documented:
    found = source.find(name)
    if not isinstance(found, Documented):
        raise Fault(f"{page}: {name}: no such function, class or value")
    if found.docstring is None:
        raise Fault(f"{page}: {name} has no docstring")
    return found


def _rewritten(page: Path, text: str, source: Source, index: Index) -> str:
    def region(match: re.Match[str]) -> str:
        name = match[1]
        if name == LAYERS:
            return f"<!-- generated: {name} -->\n\n{_layers(source.root / 'pyproject.toml')}\n\n<!-- end -->"
        if name == OPTIONS:
            body = "\n\n".join(Writer(source, index, page, name, 0).options())
            return f"<!-- generated: {name} -->\n\n{body}\n\n<!-- end -->"
        above = FENCED.sub("", REGION.sub("", text[: match.start()]))
        level = max((len(marks) for marks in re.findall(r"^(#+) ", above, re.MULTILINE)[-1:]), default=0) + 1
        body = Writer(source, index, page, name, level).write(_described(source, name, page))
        return f"<!-- generated: {name} -->\n\n{body}\n\n<!-- end -->"

    written = _formatted(page, REGION.sub(region, text))
    anchors = Counter(slug(heading) for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", written), re.MULTILINE))
    for place in index.places.values():
        if place.page == page and anchors[place.anchor] > 1:
            raise Fault(f"{page}: more than one heading with the anchor #{place.anchor}")
    return written


def _layers(project: Path) -> str:
    """Return a drawing of the layers in the package's import contract in a pyproject.toml, from the top down."""
    contracts = tomllib.loads(project.read_text())["tool"]["importlinter"]["contracts"]
    found = [
        contract["layers"]
        for contract in contracts
        if contract["type"] == "layers" and contract["containers"] == [PACKAGE]
    ]
    if len(found) != 1:
        raise Fault(f"{project}: {len(found)} import contracts of {PACKAGE} have layers, instead of one")
    lines = ["   ".join(re.findall(r"\w+", layer)) for layer in found[0]]
    width = max(map(len, lines)) + 2
    rows = "\n".join(f"│ {line:{width - 2}} │" for line in lines)
    return f"```text\n┌{'─' * width}┐\n{rows}\n└{'─' * width}┘\n```"


def _formatted(page: Path, text: str) -> str:
    """Format the code on a page with ``ruff format``."""
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(page), "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise Fault(f"{page}: {done.stderr}")
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to work on (default: this one)")
    options = parser.parse_args(arguments)
    warnings = _Warnings()
    logging.getLogger("griffe").addHandler(warnings)
    stale = 0
    try:
        for page, (old, new) in pages(options.root / "docs", Source.read(options.root)).items():
            if old == new:
                continue
            name = str(page.relative_to(options.root))
            if options.check:
                stale += 1
                sys.stdout.writelines(
                    difflib.unified_diff(
                        old.splitlines(keepends=True), new.splitlines(keepends=True), name, f"{name} (generated)"
                    )
                )
            else:
                page.write_text(new)
                print(f"Wrote {name}")
    except Fault as fault:
        warnings.texts.append(str(fault))
    finally:
        logging.getLogger("griffe").removeHandler(warnings)
    for text in warnings.texts:
        print(text, file=sys.stderr)
    if stale:
        print(f"Pages out of date: {stale}. Run make reference.", file=sys.stderr)
    return 1 if stale or warnings.texts else 0


if __name__ == "__main__":
    sys.exit(main())
