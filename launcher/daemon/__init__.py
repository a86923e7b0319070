"""The running daemon: composition root, operations, status, hardware changes. Only `cli.serve` imports `main`."""
