"""The comparison of two sides that answer the same texts, and the search for the cause of a difference.

`quartet.compare` is the command. A side is a server (`servers`), a bundle (`bundle_side`) or a checkpoint
(`reference`); `causes` names what makes two sides equal, and `figures` measures how equal they are.
"""
