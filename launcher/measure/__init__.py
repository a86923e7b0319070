"""Measuring: `bench` an endpoint, `tune` the layout of a machine by benching candidates. Knows no daemon from inside."""
