"""Clients' side: listeners, TLS, connections, uploads, response writing."""
