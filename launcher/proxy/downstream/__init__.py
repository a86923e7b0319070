"""Clients: listeners, TLS, connections, uploads, response writing."""
