"""The API reference has everything public, as the source has it, and says where it cannot be made."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap

import pytest

from tests.support.documents import DOCS, parsed
from tests.support.paths import ROOT
from tools import reference

pytestmark = pytest.mark.any_engine

DOORS = ("", ".inspection", ".testing", ".signals", ".otel", ".health", ".metrics")
"""Modules that users import from: whatever their ``__all__`` names is public."""
DESCRIBED_ELSEWHERE = ("django_mysqlqueue.admin", "django_mysqlqueue.models")
"""Classes to register or to query: docs/howto/dashboard.md, docs/tables.md."""


def described():
    return {name for page in DOCS.rglob("*.md") for name in reference.REGION.findall(page.read_text())}


def test_pages_have_the_signatures_and_docstrings_of_the_source(capsys):
    code = reference.main(["--check"])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err


def test_every_public_name_is_in_the_reference():
    public = {
        f"django_mysqlqueue{door}.{name}"
        for door in DOORS
        for name in importlib.import_module(f"django_mysqlqueue{door}").__all__
    }
    assert len(public) > 20
    assert not public - described(), "add a region for each (CONTRIBUTING.md) and run make reference"


def test_every_name_that_a_page_imports_is_in_the_reference():
    """A module counts as described if something of it is."""
    known = described()
    imported = {
        f"{node.module}.{alias.name}": where
        for where, tree in parsed()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] in ("django_mysqlqueue", "pyspark_mysqlqueue")
        if node.module not in DESCRIBED_ELSEWHERE
        for alias in node.names
    }
    assert len(imported) > 10
    missing = {
        name: where
        for name, where in imported.items()
        if name not in known and not any(one.startswith(f"{name}.") for one in known)
    }
    assert not missing, missing


def test_functions_have_the_arguments_of_their_pages():
    """Those that a decorator gives them, too."""
    source = reference.Source.read(reference.ROOT)
    functions = {name: found for name in described() if (found := source.find(name)) and found.is_function}
    assert len(functions) > 50
    for name, found in functions.items():
        module, _, attribute = name.rpartition(".")
        real = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters.values()
        several = ("variadic positional", "variadic keyword")
        assert [(one.name, one.kind.value) for one in found.parameters] == [
            (one.name, one.kind.description) for one in real
        ], name
        assert [one.name for one in found.parameters if one.default is None or one.kind.value in several] == [
            one.name for one in real if one.default is one.empty
        ], name


def test_the_source_is_parsed_and_not_imported():
    code = (
        "import sys; from tools import reference; reference.Source.read(reference.ROOT); "
        "sys.exit('django' in sys.modules or 'django_mysqlqueue' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SOURCE = '''
"""A package."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

OnError = Literal["raise", "ignore"]
MOST = 10
UNSET: Any = object()


class Broken(ValueError):
    """It is <b>broken</b>, by ``<someone>``."""


class Lost(Broken):
    """Gone."""


@dataclass(frozen=True)
class Row:
    """A row."""

    LIMIT: ClassVar[int] = 3

    id: int
    """Its number."""
    name: str = ""
    _hidden: int = 0


class Table:
    """A table of ``Row`` objects.

    Attributes:
        size: how many there are.
        first, second: the outermost two.
    """

    def __init__(self, row: Row, other: Row | None = None) -> None:
        self.size = row.id or 0
        self.first = row.name
        self.second: str = "x"
        self._other = other

    @property
    def age(self) -> float:
        """Seconds since it was made.

        Raises:
            Broken: nobody knows.
        """
        return 1.0

    @cached_property
    def undocumented(self) -> int:
        return 1

    @classmethod
    def of(cls, text: str) -> Table:
        """Make one of a text."""

    async def read(self) -> Row:
        """Read ``Row``."""

    def _private(self):
        """Not for others."""

    def no_docstring(self):
        pass


class Reader:
    """Reads.

    Args:
        table: the table.
    """

    def __init__(self, table: Table) -> None:
        self.table = table


def find(
    first: int,
    /,
    second: datetime.datetime | None = None,
    *rest: int,
    on_error: OnError = "raise",
    most: int = MOST,
    wait: float = UNSET,
    **options: Any,
) -> list[Row]:
    """Find rows.

    It is ``Table.read()`` for
    several. See ``find``.

    Args:
        first: the first.
        second: the second,
            in two lines.
        *rest: more of them.
        on_error: what to do.
        most: how many.
        wait: seconds.
        **options: the rest.

    Returns:
        ``id, name``: rows of both,
        in order.

    Raises:
        Broken: something is.
        LookupError: there is none.
    """


def short(*, only: int) -> Iterator[int]:
    """Do little.

    Yields:
        Numbers, upwards.
    """


changed = object()
"""Sent when something has changed.

Args:
    row: the ``Row``.
"""
'''
PAGE = """# All

```sh
# no heading
```

<!-- generated: django_mysqlqueue.find -->
<!-- end -->

Between the two.

<!-- generated: django_mysqlqueue.short -->
what was here before
<!-- end -->

## Classes

<!-- generated: django_mysqlqueue.Table -->
<!-- end -->

<!-- generated: django_mysqlqueue.Reader -->
<!-- end -->
"""
OTHER = """# Others

<!-- generated: django_mysqlqueue.Row -->
<!-- end -->

<!-- generated: django_mysqlqueue.Broken -->
<!-- end -->

<!-- generated: django_mysqlqueue.Lost -->
<!-- end -->

<!-- generated: django_mysqlqueue.changed -->
<!-- end -->
"""


@pytest.fixture
def checkout(tmp_path):
    """A package and two pages about it."""
    package = tmp_path / "django_mysqlqueue"
    package.mkdir()
    (package / "__init__.py").write_text(SOURCE)
    docs = tmp_path / "docs"
    (docs / "more").mkdir(parents=True)
    (docs / "page.md").write_text(PAGE)
    (docs / "more" / "other.md").write_text(OTHER)
    return tmp_path


def run(checkout, *arguments):
    return reference.main(["--root", str(checkout), *arguments])


def section(text, name):
    return re.search(rf"<!-- generated: django_mysqlqueue.{name} -->\n\n(.*?)\n\n<!-- end -->", text, re.DOTALL)[1]


# -- how it is made, on a small package ---------------------------------------


def test_a_function_is_written_as_a_reader_needs_it(checkout):
    assert run(checkout) == 0
    text = (checkout / "docs" / "page.md").read_text()
    assert section(text, "find") == textwrap.dedent(
        """\
        ## `find()`

        ```python
        # from django_mysqlqueue import find
        def find(
            first: int,
            /,
            second: datetime.datetime | None = None,
            *rest: int,
            on_error: Literal["raise", "ignore"] = "raise",
            most: int = 10,
            wait: float = ...,
            **options: Any,
        ) -> list[Row]: ...
        ```

        Find rows.

        It is [`Table.read()`](#tableread) for
        several. See `find`.

        **Arguments**

        - `first`: the first.
        - `second`: the second,
          in two lines.
        - `*rest`: more of them.
        - `on_error`: what to do.
        - `most`: how many.
        - `wait`: seconds.
        - `**options`: the rest.

        **Returns**

        `id, name`: rows of both,
        in order.

        **Raises**

        - [`Broken`](more/other.md#exception-broken): something is.
        - `LookupError`: there is none."""
    )
    assert "\n\nBetween the two.\n\n" in text
    assert "what was here before" not in text
    short = section(text, "short")
    assert "def short(*, only: int) -> Iterator[int]: ..." in short
    assert short.endswith("**Yields**\n\nNumbers, upwards.")


def test_a_class_is_written_with_its_attributes_and_methods(checkout):
    assert run(checkout) == 0
    text = (checkout / "docs" / "page.md").read_text()
    assert section(text, "Table") == textwrap.dedent(
        """\
        ### class `Table`

        ```python
        # from django_mysqlqueue import Table
        class Table: ...
        ```

        A table of [`Row`](more/other.md#class-row) objects.

        **Attributes**

        - `size` (`int`): how many there are.
        - `first`, `second` (`str`): the outermost two.
        - `age` (`float`): Seconds since it was made.

          **Raises**

          - [`Broken`](more/other.md#exception-broken): nobody knows.

        #### `Table.of()`

        ```python
        @classmethod
        def of(cls, text: str) -> Table: ...
        ```

        Make one of a text.

        #### `Table.read()`

        ```python
        async def read(self) -> Row: ...
        ```

        Read [`Row`](more/other.md#class-row)."""
    )
    assert "class Reader:\n    def __init__(self, table: Table) -> None: ...\n" in section(text, "Reader")


def test_dataclasses_exceptions_and_signals_are_written(checkout):
    assert run(checkout) == 0
    text = (checkout / "docs" / "more" / "other.md").read_text()
    row = section(text, "Row")
    assert '@dataclass(frozen=True)\nclass Row:\n    id: int\n    name: str = ""\n```' in row
    assert row.endswith("**Attributes**\n\n- `id` (`int`): Its number.")
    assert section(text, "Broken").endswith(
        "class Broken(ValueError): ...\n```\n\nIt is \\<b>broken\\</b>, by `<someone>`."
    )
    assert section(text, "Lost").startswith("## exception `Lost`\n\n```python\n# from django_mysqlqueue import Lost\n")
    assert section(text, "changed").endswith(
        "Sent when something has changed.\n\n**Arguments**\n\n- `row`: the [`Row`](#class-row)."
    )


LAYERS = """# Layers

<!-- generated: layers -->
<!-- end -->
"""
CONTRACT = """
[[tool.importlinter.contracts]]
type = "{kind}"
containers = ["django_mysqlqueue"]
layers = ["doors | pages", "protocol"]

[[tool.importlinter.contracts]]
type = "acyclic_siblings"
"""


def test_the_layers_are_drawn_as_the_import_contract_has_them(checkout):
    (checkout / "docs" / "layers.md").write_text(LAYERS)
    (checkout / "pyproject.toml").write_text(CONTRACT.format(kind="layers"))
    assert run(checkout) == 0
    text = (checkout / "docs" / "layers.md").read_text()
    assert re.findall(r"^│ (.*?) *│$", text, re.MULTILINE) == ["doors   pages", "protocol"]
    assert run(checkout, "--check") == 0
    (checkout / "pyproject.toml").write_text(CONTRACT.format(kind="layers").replace("doors | ", ""))
    assert run(checkout, "--check") == 1


def test_layers_without_a_contract_are_a_fault(checkout, capsys):
    (checkout / "docs" / "layers.md").write_text(LAYERS)
    (checkout / "pyproject.toml").write_text(CONTRACT.format(kind="forbidden"))
    assert run(checkout) == 1
    assert "0 import contracts of django_mysqlqueue have layers, instead of one" in capsys.readouterr().err


def test_a_stale_page_is_shown_and_left_alone_by_check(checkout, capsys):
    page = checkout / "docs" / "page.md"
    assert run(checkout, "--check") == 1
    shown = capsys.readouterr()
    assert "+## `find()`" in shown.out
    assert "Pages out of date: 2. Run make reference." in shown.err
    assert page.read_text() == PAGE
    assert run(checkout) == 0
    assert run(checkout, "--check") == 0
    written = page.stat().st_mtime_ns
    assert run(checkout) == 0
    assert page.stat().st_mtime_ns == written
    source = checkout / "django_mysqlqueue" / "__init__.py"
    source.write_text(source.read_text().replace("most: int = MOST", "most: int = 11"))
    capsys.readouterr()
    assert run(checkout, "--check") == 1
    shown = capsys.readouterr()
    assert "-    most: int = 10," in shown.out
    assert "+    most: int = 11," in shown.out


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        (PAGE.replace("queue.short", "queue.long"), "page.md: django_mysqlqueue.long: no such function"),
        (PAGE.replace("django_mysqlqueue.short", "os.path"), "page.md: os.path: no such function"),
        (PAGE.replace("queue.short", "queue.MOST"), "page.md: django_mysqlqueue.MOST has no docstring"),
        (PAGE.replace("queue.short", "queue.Row"), "page.md: django_mysqlqueue.Row is described in"),
        (f"{PAGE}\n## Find\n", "page.md: more than one heading with the anchor #find"),
        (PAGE.replace("before\n<!-- end -->", "before"), "page.md: a region is not delimited"),
        (PAGE.replace("<!-- generated: django_mysqlqueue.short -->\n", ""), "page.md: a region is not delimited"),
    ],
)
def test_a_page_that_cannot_be_made_is_named_and_nothing_is_written(checkout, capsys, page, fault):
    (checkout / "docs" / "page.md").write_text(page)
    assert run(checkout) == 1
    assert fault in capsys.readouterr().err
    assert (checkout / "docs" / "page.md").read_text() == page
    assert (checkout / "docs" / "more" / "other.md").read_text() == OTHER


def test_a_docstring_that_does_not_fit_its_signature_is_named(checkout, capsys):
    source = checkout / "django_mysqlqueue" / "__init__.py"
    source.write_text(source.read_text().replace("most: how many.", "least: how many."))
    assert run(checkout) == 1
    assert "Parameter 'least' does not appear in the function signature" in capsys.readouterr().err
    assert "- `least`: how many." in (checkout / "docs" / "page.md").read_text()
