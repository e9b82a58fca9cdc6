"""Sphinx builds the documentation: ``make docs``. Nothing is fetched from anywhere."""

from __future__ import annotations

from django_mysqlqueue import __version__

project = "django-mysqlqueue"
release = version = __version__

extensions = ["myst_parser"]
exclude_patterns = ["conf.py"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 5

html_theme = "furo"
html_title = f"django-mysqlqueue {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
