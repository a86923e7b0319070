"""Searching the layout that makes this machine fastest: candidates, a pure search, visits that measure."""
