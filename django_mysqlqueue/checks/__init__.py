"""System checks, and the privileges of database users."""
