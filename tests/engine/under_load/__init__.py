"""Two real vLLM instances under load: third-party clients, configuration changes, kills.

All but test_embeddings share one daemon and run in the order of their names; test_daemon_killed ends it.
"""
