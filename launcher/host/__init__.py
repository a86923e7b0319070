"""The host: systemd notification, journal, CPU facts, OOM events, memory placement of processes."""
