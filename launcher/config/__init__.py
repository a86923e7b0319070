"""What the operator asked for: TOML file, environment, flags. Knows nothing of the machine."""
