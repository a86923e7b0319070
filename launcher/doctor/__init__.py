"""Checks of a host and its software before the daemon starts.

`gather` collects facts (effects); `checks` judges them and `rows` prints the result (pure). Knows no daemon and no plan.
"""
