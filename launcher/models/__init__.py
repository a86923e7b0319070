"""What a model is, by its config.json and the headers of its weight files: sizes, layers, state for each token."""
