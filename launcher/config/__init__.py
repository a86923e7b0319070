"""What the operator asked for. Knows TOML, the environment and flags; knows nothing of the machine."""
