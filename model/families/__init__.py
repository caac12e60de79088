"""Families of encoders: one file each, with its configuration, its encoder and the hub's names for its parameters.

Callers use `registry`; a new family is a new file and a row there.
"""
