"""The error of a checkpoint that cannot be read."""

INSTALL_TRAIN = 'pip install "quartet-serving[train]"'
INSTALL_HUB = 'pip install "quartet-serving[hub]"'


class CheckpointError(ValueError):
    """A checkpoint that cannot be read; the message names the file and the error."""
