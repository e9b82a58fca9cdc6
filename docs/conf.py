"""Sphinx builds the documentation: ``make docs``. Nothing is fetched from anywhere."""

from __future__ import annotations

import django
from django.conf import settings

from django_mysqlqueue import __version__

# The reference comes from docstrings; importing what they stand in needs settings.
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django_mysqlqueue"],
    USE_TZ=True,
)
django.setup()

project = "django-mysqlqueue"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["conf.py"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = False
# Types of other projects: their documents are not at hand when this is built.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(datetime|collections|asyncio|typing|django|pytest|unittest|opentelemetry|prometheus_client|health_check)\..*",
    ),
    ("py:class", r"django_mysqlqueue\.runtime\.registry\.(One|Many)"),
    (
        "py:.*",
        r"(Any|Callable|Iterable|Mapping|Literal|ValueError|Exception|RuntimeError)",
    ),
]

html_theme = "furo"
html_title = f"django-mysqlqueue {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
