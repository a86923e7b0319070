"""What this host and its software can do for vLLM, before anything starts.

`gather` looks (E); `rules` hold what was found against what is needed, `compatibility` against the published
sets of versions, and `report` draws the conclusion (P). Knows nothing of a running daemon or a plan.
"""
