"""The APIs of other servers: each module translates one to the same engine calls, with its own errors and defaults.

`registry.DIALECTS` has their routers and the forms of their errors. A dialect is one more module and one entry there.
"""
