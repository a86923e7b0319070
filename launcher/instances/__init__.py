"""Keeps an instance running in each slot: state machine, spawners, health checks, causes. Emits events; knows no proxy."""
