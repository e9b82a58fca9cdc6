"""Base classes and helpers of the management commands."""
