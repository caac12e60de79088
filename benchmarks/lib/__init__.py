"""What all benchmarks share: load generation, rounds, servers, processes, the machine.

Callers are the benchmarks next to it.
"""
