"""Integrations with other packages that a project may use."""
