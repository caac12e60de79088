"""From a checkpoint to a verified bundle: the only package that sees both training and serving."""
