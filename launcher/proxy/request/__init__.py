"""One request: its record, the words of its lifecycle, every decision about it. Pure: no I/O, no clock."""
