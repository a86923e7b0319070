"""Two real vLLM instances with work all along: asked by programs of others, changed, killed.

The files share one daemon and run in the order of their names; test_daemon_killed ends it.
"""
