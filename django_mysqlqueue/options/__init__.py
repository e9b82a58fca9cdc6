"""The options of consumer groups: one table, which everything that declares, checks, changes or shows one reads."""
