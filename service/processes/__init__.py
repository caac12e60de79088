"""Processes: the supervisor, its HTTP and inference processes, and what they send each other.

Callers use `supervisor` and `single_process`; `child_main` is the entry point of a child process.
"""
