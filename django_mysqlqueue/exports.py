"""Public names of a package that are loaded on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loaded_on_use(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    ``homes``: the names, separated by spaces, by the module that each is in, relative to the package.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        namespace[name] = getattr(import_module(modules[name], package), name)
        return namespace[name]

    return load, lambda: sorted({*namespace, *modules})
