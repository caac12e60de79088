"""Measurements: each script prints a table for people and one JSON line last for machines."""
