"""What the proxy reads of the OpenAI API: request bodies, models, error bodies, usage."""
