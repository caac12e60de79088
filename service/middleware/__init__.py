"""What happens to every request before its route runs: context, access control, early rejection, tracing.

Callers use `request_lifecycle` around the application, and the checks that `access_control` and `early_rejection` make.
"""
