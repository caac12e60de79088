"""From a checkpoint to a verified bundle: the only package that sees both training and serving."""

import service.core.standard_streams  # noqa: F401  opens them, before a library opens a file
