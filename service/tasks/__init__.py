"""The tasks: each plans how the heads of a model answer a request.

A task is a record of inputs and options. An engine computes its plan, for any API that creates it.
"""
