"""Processes: the supervisor, its HTTP and inference processes, and the messages between them.

Callers use `supervisor` and `single_process`; `child_main` is the entry point of a child process.
"""
