"""Processing of every request before its route runs: context, access control, early rejection, tracing.

Callers wrap the application in `request_lifecycle` and pass it the checks of `access_control` and `early_rejection`.
"""
