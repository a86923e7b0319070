"""llama.cpp's server: `kind = "llama.cpp"`, and what a command template says that starts it."""
