"""The settings of a checkpoint that neither Quartet nor the reference libraries read, for a line of the export."""

from pathlib import Path

from model.checkpoints.config_table import unknown_settings
from model.checkpoints.json_files import read_object
from model.checkpoints.sentence_config import encoder_folder, unknown_sentence_settings


def unread_settings(folder: Path) -> str:
    """Return the names by their files: `config.json: a, b; 1_Pooling/config.json: c`. Empty where there are none."""
    path = encoder_folder(folder) / "config.json"
    names = {str(path.relative_to(folder)): unknown_settings(read_object(path))}
    names |= unknown_sentence_settings(folder)
    return "; ".join(f"{file}: {', '.join(unknown)}" for file, unknown in names.items() if unknown)
