"""Sharding rules: how an operator may run on one mesh axis (the language in `language`, one table a family)."""
