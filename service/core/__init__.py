"""The core shared by training, export and serving: bundles, encoding, packing, sessions and decoding.

All of its modules may be used from outside `service`; they take plain arguments and import only each other.
"""
