"""The command `quartet`: from a model's name or a file of labeled texts to an endpoint.

No package imports this one. `quartet.command` has the table of commands.
"""
