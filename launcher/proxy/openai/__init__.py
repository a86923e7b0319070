"""What the proxy reads of the OpenAI API: request bodies, model names, usage, error bodies."""
