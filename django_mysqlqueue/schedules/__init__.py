"""Recurring schedules: what a project declares, and when it is due. Nothing here touches a database."""
