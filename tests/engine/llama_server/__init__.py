"""The real llama-server under configs/command-engine.toml: what it does, and that it is supervised honestly.

scripts/build-llama-server builds it; without it these tests are skipped, and the lane says so.
"""
