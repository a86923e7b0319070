"""Checks of a host and its software before the daemon starts.

`gather` collects facts (effects); `rules`, `compatibility` and `report` judge them (pure). Knows no daemon and no plan.
"""
