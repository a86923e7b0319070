"""Effects on and facts of the host: systemd notification, the journal, CPU facts, placement as it is."""
