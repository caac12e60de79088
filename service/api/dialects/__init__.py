"""The APIs of other servers: each module translates one to the same engine calls, with its own errors and defaults."""
