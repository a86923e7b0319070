"""Two real vLLM instances with work all along: asked by programs of others, changed, killed.

All but test_embeddings share one daemon and run in the order of their names; test_daemon_killed ends it.
"""
