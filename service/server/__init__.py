"""Sockets and connections: the HTTP server that runs the application.

Callers use `server.Server`, `sockets` and `unix_socket`.
"""
