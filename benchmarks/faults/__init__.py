"""Overload and faults: what is left of a server when it is overloaded, killed or sent bad requests."""
