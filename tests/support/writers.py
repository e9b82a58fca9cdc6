"""The functions that write, as the code says, and as statements show."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tests.support.one_at_a_time import one_at_a_time
from tests.support.rooms import module_of, sources


def writing_functions() -> set[str]:
    """Those that execute a statement or open a transaction."""
    found: set[str] = set()

    def visit(node: ast.AST, module: str, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inside = "" if isinstance(child, ast.ClassDef) else ".<locals>"
                visit(child, module, f"{path}{child.name}{inside}.")
            else:
                if isinstance(child, ast.Call) and _writes(child):
                    found.add(f"{module}.{path.removesuffix('.').removesuffix('.<locals>')}")
                visit(child, module, path)

    for module, file in sources():
        visit(ast.parse(file.read_text()), module, "")
    return found


def _writes(call: ast.Call) -> bool:
    """Calls of a session or of ``run``, or what a query set does: unlike a dict's, its ``update`` takes keywords."""
    if isinstance(call.func, ast.Name):
        return call.func.id == "run"
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    if name in ("insert", "update", "delete") and ast.unparse(call.func.value).endswith("session"):
        return True
    if name == "update":
        return bool(call.keywords)
    if name == "delete":
        return not call.args
    return name in (
        "execute",
        "later",
        "update_later",
        "create",
        "bulk_create",
        "save",
        "get_or_create",
        "update_or_create",
    )


@contextlib.contextmanager
def watched(seen: set[str], connections: Iterable[Any]) -> Iterator[None]:
    """Adds to ``seen`` every function of the package that has a part in a statement of these connections."""

    def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        frame = sys._getframe()
        while frame is not None:
            code = frame.f_code
            module = module_of(code.co_filename)
            if module is not None:
                seen.add(f"{module}.{code.co_qualname}")
            frame = frame.f_back  # type: ignore[assignment]
        return execute(sql, params, many, context)

    with contextlib.ExitStack() as stack:
        stack.enter_context(one_at_a_time())
        for connection in connections:
            stack.enter_context(connection.execute_wrapper(watch))
        yield
