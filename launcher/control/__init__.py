"""Operator to daemon: the verbs, their wire form, the UNIX-socket server and its client."""
