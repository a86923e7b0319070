"""The running daemon: composition root, operations, status, drift. Only `cli.serve` imports `main`."""
