"""What happens to every request before its route runs: context, access control, early rejection, tracing.

Callers use `lifecycle` around the application, and the checks that `access` and `early_rejection` make.
"""
