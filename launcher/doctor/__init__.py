"""Checks of a host and its software before the daemon starts.

`gather` collects facts (effects); `checks` judges them, and the engine its own software (pure). Knows no daemon.
"""
