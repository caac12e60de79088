"""Sockets and connections: the HTTP server that runs the application.

Callers use `server.serve` and `sockets`.
"""
