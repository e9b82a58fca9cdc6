"""The package's version. Importing it imports nothing else."""

__version__ = "0.2.0"
