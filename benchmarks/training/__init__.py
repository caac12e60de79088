"""Benchmarks of training: speed of steps, and families pretrained under one budget."""
