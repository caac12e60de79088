"""The files of a sentence-transformers directory, which that library reads where there is a `modules.json`.

The Transformer's folder is named there; it has `config.json`, weights, tokenizer, and one of SENTENCE_FILES.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from tokenizers import Tokenizer, normalizers

from model.checkpoints.errors import CheckpointError
from model.checkpoints.json_files import read_json, read_object, read_optional_object
from model.checkpoints.settings_table import SettingsFile, honored, no_effect, refused, shown
from service.core.manifest import PROMPT_NAMES

MODULES, ROOT = "modules.json", "config_sentence_transformers.json"
ROUTER, ROUTER_FILE = "Router", "router_config.json"
STATIC = "StaticEmbedding"
PREFIX = "sentence_transformers."
SENTENCE_FILES = (  # in the order of sentence-transformers: the first that is not empty counts
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
SENTENCE = "sentence_embedding"  # the name of a text's vector between modules
TOKENS = "token_embeddings"  # the name of the vectors of a text's tokens
KINDS = {
    "SentenceTransformer": "feature-extraction",
    "CrossEncoder": "sequence-classification",
    "MultiVectorEncoder": "feature-extraction",
    "ColBERT": "feature-extraction",  # as PyLate writes it
    "SparseEncoder": "fill-mask",
}
EXPANDED = 32  # tokens of a query of ColBERT, where no setting states another number
MULTI_VECTOR = ("MultiVectorEncoder", "ColBERT")
FIRST_COLBERT = (
    "HF_ColBERT"  # the architecture of the first ColBERT code, which has its settings in METADATA
)
METADATA = "artifact.metadata"
RENAMED = {"MLMTransformer": "Transformer"}  # of a SparseEncoder, in sentence-transformers 5
PYLATE = {"pylate.models.Dense.Dense": "Dense"}  # modules of PyLate, and what they are here
IN_MULTI_VECTOR = "in a MultiVectorEncoder, refused in others"
ONLY_OWN = "sentence_embedding, or token_embeddings in a MultiVectorEncoder; others are refused"
PYLATE_SETTINGS = (
    *("query_prefix", "document_prefix", "query_length", "document_length", "query_expansion"),
    *("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
    "skiplist_words",
)
REMOTE_CODE = ({}, {"trust_remote_code": True}, {"trust_remote_code": False})  # which is ignored


def _text(output: str) -> dict[str, Any]:
    return {"text": {"method": "forward", "method_output_name": output}}


# The settings of a CrossEncoder that is a language model: a chat template makes one text of a pair.
CHAT = {**_text("logits"), "message": {**_text("logits")["text"], "format": "flat"}}
CHAT_SETTINGS = {
    "transformer_task": "text-generation",
    "modality_config": CHAT,
    "module_output_name": "causal_logits",
}


TRANSFORMER_TABLE = SettingsFile(
    SENTENCE_FILES[0],
    "sentence-transformers",
    (
        *honored("max_seq_length", note="no more than the model has positions"),
        *honored("do_lower_case"),
        refused("transformer_task", *KINDS.values()),
        refused("modality_config", _text("last_hidden_state"), _text("logits"), note="text only"),
        refused("module_output_name", "token_embeddings", "scores"),
        refused("processing_kwargs", {}),
        *honored("query_length", "document_length", "query_expansion", note=IN_MULTI_VECTOR),
        *(
            refused(name, *REMOTE_CODE, note="arguments of transformers")
            for name in (
                *("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs"),
                *("config_args", "config_kwargs"),
            )
        ),
        refused("tokenizer_name_or_path", note="a tokenizer of another directory"),
        *no_effect("unpad_inputs", note="changes how the library computes, not the result"),
    ),
)
ROOT_TABLE = SettingsFile(
    ROOT,
    "sentence-transformers",
    (
        refused("model_type", *KINDS),
        *honored("activation_fn", note="in a CrossEncoder"),
        *honored("prompts", "default_prompt_name", note="in a SentenceTransformer"),
        *no_effect("similarity_fn_name", note="used to compare vectors, not to compute them"),
        *honored(*PYLATE_SETTINGS, note="a setting of PyLate, in a MultiVectorEncoder"),
        refused("truncate_dim", note="remove it, and send `dimensions` in requests"),
        *no_effect("keep_in_fp32_modules", note="the head of every precision is fp32 or checked"),
        *no_effect("__version__", "requirements"),
    ),
)
MODULES_TABLE = SettingsFile(
    MODULES,
    "sentence-transformers",
    (
        *honored("type", "path"),
        *no_effect("idx", "name"),
        *no_effect("kwargs", note="names of arguments of `encode`"),
    ),
)
WEIGHTED = "WeightedLayerPooling"
WEIGHTED_TABLE = SettingsFile(
    "1_WeightedLayerPooling/config.json",
    "sentence-transformers",
    (
        *honored("layer_start", note="used only if config.json sets output_hidden_states"),
        *no_effect("embedding_dimension", "word_embedding_dimension", note="the width of states"),
        *no_effect("num_hidden_layers", note="there is a weight for each layer"),
        refused("layer_weights", note="the weights are in the weight file"),
    ),
)
POOLING_MODES = {  # the switch of each way to pool, in the order of sentence-transformers
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
POOLING_TABLE = SettingsFile(
    "1_Pooling/config.json",
    "sentence-transformers",
    (
        *honored("pooling_mode", note="one, or several, which are concatenated"),
        *honored(*POOLING_MODES, note="where there is no pooling_mode; the mean where all are off"),
        *no_effect("embedding_dimension", "word_embedding_dimension", note="the width of states"),
        *honored("include_prompt", note="false is refused where a prompt has a text"),
    ),
)
DENSE_TABLE = SettingsFile(
    "2_Dense/config.json",
    "sentence-transformers",
    (
        *honored("in_features", "out_features"),
        *honored("bias", note="true where it is left out"),
        *honored("activation_function", note="Tanh (also where it is left out) or Identity"),
        *honored("module_input_name", "module_output_name", note=ONLY_OWN),
        refused("use_residual", False),
    ),
)
LAYER_NORM_TABLE = SettingsFile(
    "2_LayerNorm/config.json", "sentence-transformers", (*honored("dimension"),)
)
NORMALIZE_TABLE = SettingsFile(
    "3_Normalize/config.json",
    "sentence-transformers",
    (*honored("module_input_name", "module_output_name", note=ONLY_OWN),),
)
MASK_TABLE = SettingsFile(
    "2_MultiVectorMask/config.json",
    "sentence-transformers",
    (
        *honored("skiplist_words"),
        refused("skiplist_tasks", ["document"], "document", note="words that queries lose"),
        refused("keep_only_token_ids", [], note="parts of images"),
    ),
)
SPLADE_TABLE = SettingsFile(
    "1_SpladePooling/config.json",
    "sentence-transformers",
    (
        refused("pooling_strategy", "max", note="of sums, the batch would change the last digits"),
        *honored("activation_function", note="relu or log1p_relu"),
        *no_effect("embedding_dimension", "word_embedding_dimension", note="the vocabulary's size"),
        *no_effect("chunk_size", note="changes how the library computes, not the result"),
    ),
)
LOGIT_TABLE = SettingsFile(
    "1_LogitScore/config.json",
    "sentence-transformers",
    (
        *honored("true_token_id", "false_token_id", note="the score is the difference of logits"),
        refused("module_input_name", "causal_logits"),
    ),
)
SENTENCE_TABLES = (
    *(TRANSFORMER_TABLE, ROOT_TABLE, MODULES_TABLE),
    *(POOLING_TABLE, DENSE_TABLE, LAYER_NORM_TABLE, NORMALIZE_TABLE, MASK_TABLE, SPLADE_TABLE),
    WEIGHTED_TABLE,
    LOGIT_TABLE,
)


def is_sentence_directory(folder: Path) -> bool:
    return (folder / MODULES).is_file()


def encoder_folder(folder: Path) -> Path:
    """Return the folder of the Transformer that `modules.json` names; the folder itself where there is none."""
    if not is_sentence_directory(folder):
        return folder
    modules = read_all_modules(folder)
    return next((place for kind, place in modules if kind in ("Transformer", STATIC)), folder)


def static_folder(folder: Path) -> Path | None:
    """Return the folder of the table of static embeddings; None in a directory of another model."""
    if is_sentence_directory(folder):
        first = next(iter(read_module_list(folder)), None)
        return first[1] if first and first[0] == STATIC else None
    config = read_optional_object(folder / "config.json")
    return folder if config.get("model_type") == "model2vec" else None


def config_file(folder: Path) -> Path:
    """Return the `config.json` of a checkpoint, which may be in a folder that `modules.json` names."""
    return encoder_folder(folder) / "config.json"


def read_module_list(folder: Path) -> list[tuple[str, Path]]:
    """Return class name and folder of each module in `modules.json`, in order. Raises CheckpointError."""
    path, modules = folder / MODULES, []
    document = read_json(path)
    if not isinstance(document, list):
        raise CheckpointError(f"{path}: must be a list of modules, not {type(document).__name__}")
    for module in document:
        if not isinstance(module, Mapping):
            raise CheckpointError(f"{path}: {module!r} is no module: it must be an object")
        for name in ("type", "path"):
            if not isinstance(module.get(name), str):
                raise CheckpointError(f"{path} does not say {name} of a module, as text")
        kind, place = _kind(folder, module["type"]), module["path"]
        if ".." in PurePosixPath(place).parts or _is_absolute(place):
            raise CheckpointError(f"{path}: path {place!r} is outside the directory")
        modules.append((kind, folder / place))
    return modules


@dataclass(frozen=True)
class Router:
    """A Router module, which has modules for queries and for documents."""

    path: Path
    # Class names and folders of each route's modules, by the route's name.
    structure: Mapping[str, list[tuple[str, Path]]]
    mappings: Mapping[tuple[str | None, Any], str]  # routes by task and modality; None for any
    default: str | None  # the route of texts without a task; None if there is none

    def route(self, task: str | None) -> str:
        """Return the route of texts for a task, as sentence-transformers finds it. Raises CheckpointError."""
        for key in ((task, "text"), (task, None), (None, "text"), (None, None)):
            if key in self.mappings:
                return self.mappings[key]
        chosen = next((name for name in (task, "text") if name in self.structure), None)
        if chosen is None and task is None:
            chosen = self.default
        if chosen is None:
            what = (
                f"for {task} texts"
                if task
                else "for texts without a task: default_route is missing"
            )
            raise CheckpointError(f"{self.path}: has no route {what}")
        return chosen


def read_router(folder: Path) -> Router:
    """Read the `router_config.json` of a Router module. Raises CheckpointError for what is no such file."""
    path = folder / ROUTER_FILE
    document = read_object(path)
    try:
        kinds, structure, parameters = (document[n] for n in ("types", "structure", "parameters"))
        places = {
            route: [_inside(path, name) for name in names] for route, names in structure.items()
        }
        routes = {
            route: [(_kind(path, kinds[place.name]), place) for place in own]
            for route, own in places.items()
        }
        texts = (parameters.get("route_mappings") or {}).items()
        mappings = {ast.literal_eval(key): str(route) for key, route in texts}
        default = parameters.get("default_route")
        if default is None and parameters.get("allow_empty_key", True):
            default = next(iter(routes))
        missing = {*mappings.values(), default} - {None, *routes}
    except CheckpointError:
        raise
    except (
        AttributeError,
        LookupError,
        StopIteration,
        SyntaxError,
        TypeError,
        ValueError,
    ) as error:
        raise CheckpointError(f"{path}: cannot read the routes: {error!r}") from None
    if missing:
        raise CheckpointError(f"{path}: has no route {', '.join(sorted(map(str, missing)))}")
    return Router(path, routes, mappings, default)


def read_all_modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the modules as `read_module_list` does, with the modules of all routes instead of a Router."""
    modules = read_module_list(folder)
    if not modules or modules[0][0] != ROUTER:
        return modules
    routes = read_router(modules[0][1]).structure.values()
    return [*dict.fromkeys(module for route in routes for module in route), *modules[1:]]


def _inside(path: Path, name: str) -> Path:
    if (
        ".." in PurePosixPath(name).parts
        or _is_absolute(name)
        or len(PurePosixPath(name).parts) != 1
    ):
        raise CheckpointError(f"{path}: structure: {name!r} is no folder next to this file")
    return path.parent / name


def _kind(path: Path, whole: str) -> str:
    if whole in PYLATE:
        return PYLATE[whole]
    if not whole.startswith(PREFIX):
        raise CheckpointError(f"{path}: cannot serve the sentence-transformers module {whole}")
    name = whole.rpartition(".")[2]
    return RENAMED.get(name, name)


def _is_absolute(place: str) -> bool:
    windows = PureWindowsPath(place)
    return PurePosixPath(place).is_absolute() or bool(windows.drive) or ".." in windows.parts


def read_sentence_config(folder: Path) -> Mapping[str, Any]:
    """Return the content of the first of SENTENCE_FILES that is not empty, or nothing. Raises CheckpointError."""
    found = _find_sentence_config(folder)
    if found is None:
        return {}
    path, document = found
    kind = read_kind(folder)
    if kind == "CrossEncoder" and CHAT_SETTINGS.items() <= document.items():
        document = {name: value for name, value in document.items() if name not in CHAT_SETTINGS}
    TRANSFORMER_TABLE.check(path, document)
    task = document.get("transformer_task")
    for name in ("query_length", "document_length", "query_expansion"):
        if document.get(name) is not None and kind not in MULTI_VECTOR:
            value = shown(document[name])
            raise CheckpointError(f"{path}: {name} = {value} is not supported in a {kind}")
    if task is not None and task != KINDS[kind]:
        raise CheckpointError(f"{path}: transformer_task = {task!r} is not that of a {kind}")
    length = document.get("max_seq_length")
    if length is not None and (
        isinstance(length, bool) or not isinstance(length, int) or length < 1
    ):
        raise CheckpointError(f"{path}: max_seq_length = {length!r} must be a positive integer")
    if not isinstance(document.get("do_lower_case", False), bool | None):
        raise CheckpointError(
            f"{path}: do_lower_case = {document['do_lower_case']!r} must be true or false"
        )
    return document


def _find_sentence_config(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    if not is_sentence_directory(folder):
        return None
    for name in SENTENCE_FILES:
        path = encoder_folder(folder) / name
        document = read_optional_object(path)
        if document:
            return path, document
    return None


def read_root_config(folder: Path) -> Mapping[str, Any]:
    """Return `config_sentence_transformers.json`, or nothing. Raises CheckpointError for a refused setting."""
    path = folder / ROOT
    if is_first_colbert(folder):
        return _first_colbert_config(folder)
    if not is_sentence_directory(folder) or not path.is_file():
        return {}
    document = read_object(path)
    ROOT_TABLE.check(path, document)
    prompts = document.get("prompts") or {}
    if not isinstance(prompts, Mapping):
        raise CheckpointError(f"{path}: prompts = {prompts!r} must be an object")
    name = document.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in {*prompts, *PROMPT_NAMES}):
        raise CheckpointError(f"{path}: default_prompt_name = {name!r} is none of the prompts")
    for key, text in prompts.items():
        if not isinstance(text, str | None):
            raise CheckpointError(f"{path}: prompts: {key}: {text!r} must be a text")
    if document.get("model_type") == "CrossEncoder" and name is not None and prompts.get(name):
        raise CheckpointError(
            f"{path}: cannot serve a CrossEncoder's default prompt before every text: remove default_prompt_name, "
            f"and write {prompts[name]!r} before the texts in requests"
        )
    return document


def is_first_colbert(folder: Path) -> bool:
    """Return whether a directory is one of the first ColBERT code (Khattab and Zaharia 2020), as of ColBERTv2."""
    if is_sentence_directory(folder):
        return False
    return FIRST_COLBERT in (read_optional_object(config_file(folder)).get("architectures") or [])


def _first_colbert_config(folder: Path) -> Mapping[str, Any]:
    """Return METADATA, or its defaults, by the names of the settings of PyLate."""
    document = read_optional_object(folder / METADATA)
    return {
        "model_type": "ColBERT",
        "query_prefix": f"{document.get('query_token_id') or '[unused0]'} ",
        "document_prefix": f"{document.get('doc_token_id') or '[unused1]'} ",
        "query_length": document.get("query_maxlen") or EXPANDED,
        "document_length": document.get("doc_maxlen"),
        "attend_to_expansion_tokens": bool(document.get("attend_to_mask_tokens")),
        "skiplist_words": None if document.get("mask_punctuation", True) else [],
    }


def read_prompts(folder: Path) -> dict[str, Any]:
    """Return the fields `prompts` and `default_prompt` of a head that have an effect; PROMPT_NAMES always exist."""
    document = read_root_config(folder)
    prompts = {name: text or "" for name, text in (document.get("prompts") or {}).items()}
    kept = {name: text for name, text in prompts.items() if text or name not in PROMPT_NAMES}
    default = document.get("default_prompt_name")
    fields: dict[str, Any] = {"prompts": kept} if kept else {}
    return fields | ({"default_prompt": default} if prompts.get(default) else {})


def read_kind(folder: Path) -> str:
    """Return the class that wrote a directory, one of KINDS."""
    document = read_root_config(folder)
    kind = document.get("model_type")
    if kind is None and "query_prefix" in document:  # of PyLate, before it named its models
        return "ColBERT"
    return str(kind or "SentenceTransformer")


def is_multi_vector(folder: Path) -> bool:
    """Return whether a directory is one of late interaction: a MultiVectorEncoder, or a model of PyLate."""
    return read_kind(folder) in MULTI_VECTOR


def check_module_names(path: Path, document: Mapping[str, Any], own: str, default: str) -> None:
    """Raise CheckpointError for a module that reads (if unnamed: `default`) or writes other vectors than `own`."""
    name = document.get("module_input_name") or default
    for key, value in (
        ("module_input_name", name),
        ("module_output_name", document.get("module_output_name") or name),
    ):
        if value != own:
            raise CheckpointError(f"{path}: {key} = {shown(value)} is not supported: only {own}")


def read_pooling_mode(path: Path) -> tuple[str, ...]:
    """Return the modes in a Pooling module's `config.json`, which are concatenated. Raises CheckpointError."""
    document = read_object(path)
    mode = document.get("pooling_mode")
    if mode is None:
        active = tuple(mode for switch, mode in POOLING_MODES.items() if document.get(switch))
        return active or ("mean",)
    modes = (mode,) if isinstance(mode, str) else mode
    if (
        not isinstance(modes, list | tuple)
        or not modes
        or not all(isinstance(m, str) for m in modes)
    ):
        raise CheckpointError(f"{path}: pooling_mode = {mode!r} must be a name or a list of names")
    return tuple(modes)


def read_include_prompt(path: Path) -> bool:
    """Return whether a Pooling module pools the tokens of a prompt, too."""
    return bool(read_object(path).get("include_prompt", True))


def lower_case(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Lower the case of texts before a tokenizer's own normalizer, where `do_lower_case` is set."""
    if not config.get("do_lower_case"):
        return
    own = tokenizer.normalizer
    if isinstance(own, normalizers.BertNormalizer) and own.lowercase:
        return  # twice gives the same
    first = [normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(first if own is None else [*first, own])


def unknown_sentence_settings(folder: Path) -> dict[str, list[str]]:
    """Return the names in the files of a directory that sentence-transformers does not read, by the file."""
    if not is_sentence_directory(folder):
        return {}
    tables = {"Pooling": POOLING_TABLE, "Dense": DENSE_TABLE, "Normalize": NORMALIZE_TABLE}
    tables |= {
        WEIGHTED: WEIGHTED_TABLE,
        "LayerNorm": LAYER_NORM_TABLE,
        "MultiVectorMask": MASK_TABLE,
        "SpladePooling": SPLADE_TABLE,
        "LogitScore": LOGIT_TABLE,
    }
    modules = read_all_modules(folder)
    documents = [(place / "config.json", tables[kind]) for kind, place in modules if kind in tables]
    documents.append((folder / ROOT, ROOT_TABLE))
    if found := _find_sentence_config(folder):
        documents.append((found[0], TRANSFORMER_TABLE))
    return {
        str(path.relative_to(folder)): unknown
        for path, table in documents
        if path.is_file() and (unknown := table.unknown_settings(read_object(path)))
    }
