import json

from model.checkpoints.tables import unread_settings


def test_names_by_their_files(tmp_path):
    """Names that no library reads are listed by their files, in one line."""
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": 8}')
    assert "" == unread_settings(tmp_path)

    (tmp_path / "config.json").write_text('{"model_type": "bert", "colour": 1, "age": 2}')
    modules = [
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode": "cls", "speed": 3}')
    assert "config.json: age, colour; 1_Pooling/config.json: speed" == unread_settings(tmp_path)
