"""The real llama-server, under configs/command-engine.toml and by its own kind: its behaviour, and honest supervision.

It is the one that scripts/build-llama-server has built, else the wheel's.
"""
