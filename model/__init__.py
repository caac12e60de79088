"""A BERT written from scratch: its parts, its pretraining and its fine-tuning."""

import os

import service.core.standard_streams  # noqa: F401  opens them, before a library opens a file

# Hugging Face's libraries read these variables while they are loaded, and count downloads and report versions unless
# they are set. A value that the user has set is kept.
for _variable, _value in (("HF_HUB_DISABLE_TELEMETRY", "1"), ("HF_UPDATE_DOWNLOAD_COUNTS", "0")):
    if not os.environ.get(_variable):
        os.environ[_variable] = _value
