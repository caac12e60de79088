"""The core shared by training, export and serving: bundles, encoding, packing, sessions and decoding.

Packages outside `service` may use all of its modules, which take plain arguments and import only each other.
"""
