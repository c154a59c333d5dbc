"""A model in a folder: config.json and model.safetensors, checked when read."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from attention_residuals.configs import decode, encode
from attention_residuals.durable import unwritable
from attention_residuals.errors import CheckpointError, ConfigError, NewerFormatError
from attention_residuals.models.building import MODEL_CONFIGS, build
from attention_residuals.models.config import DecoderConfig
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.language_model import LanguageModel

__all__ = [
    "CONVERTED",
    "fingerprint",
    "load_config",
    "load_model",
    "load_state",
    "load_tensors",
    "load_weights",
    "read_json",
    "save_model",
    "sha256",
    "write_model",
]

CONVERTED = "attention_residuals_converted"
"""What Transformers calls the type of a converted model."""

FORMAT = 1
"""Of config.json; raised when an older version of this package could not read it."""


def save_model(model: LanguageModel, folder: Path | str) -> None:
    """Writes a model into a folder that has none yet.

    Args:
        model: Any model of this library; a tied head is not stored twice.
        folder: Is made if it does not exist.

    Raises:
        ConfigError: A model that only its own format holds.
        CheckpointError: The folder holds a model already, or cannot be written.

    Example:
        >>> import tempfile
        >>> from attention_residuals.models import Decoder, presets
        >>> folder = tempfile.mkdtemp()
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> save_model(model, folder)
        >>> torch.equal(load_model(folder).embedding.weight, model.embedding.weight)
        True
    """
    if not isinstance(model.config, (DecoderConfig, ConvertedConfig)):
        raise ConfigError(
            got=f"a {type(model).__name__}",
            expected="a Decoder or a ConvertedModel",
            do="save it with the function of its own format, such as save_inkling2",
        )
    write_model(model.config, model.state_dict(), folder)


def write_model(
    config: DecoderConfig | ConvertedConfig, tensors: Mapping[str, torch.Tensor], folder: Path | str
) -> None:
    """Writes a config and the tensors that belong to it, as ``save_model`` does."""
    folder = Path(folder)
    weights = folder / "model.safetensors"
    if weights.exists():
        raise CheckpointError(got=f"{weights} exists", expected="a folder without a model", do="name another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights)
        description = {"format": FORMAT, "model": encode(config), "sha256": sha256(weights)}
        if isinstance(config, ConvertedConfig):
            description["model_type"] = CONVERTED  # for the Auto classes of Transformers
        (folder / "config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise unwritable(folder, error) from error


def load_model(folder: Path | str) -> LanguageModel:
    """Reads a model back, with the same bits.

    Raises:
        CheckpointError: A file is missing, damaged, of a newer format or does not fit its config.
        ConfigError: A converted model, and its Transformers is not installed.
    """
    model = build(load_config(folder))
    load_weights(model, folder, assign=True)
    return model


def load_config(folder: Path | str) -> DecoderConfig | ConvertedConfig:
    """Reads the config of a saved model.

    Raises:
        CheckpointError: It is missing, damaged, of a newer format or no model's.
    """
    path = Path(folder) / "config.json"
    try:
        config = decode(read_json(path, newest=FORMAT).get("model"), MODEL_CONFIGS)
    except ConfigError as error:
        raise CheckpointError(got=f"{path}: {error.got}", expected=error.expected, do=error.do) from error
    if not isinstance(config, (DecoderConfig, ConvertedConfig)):
        raise CheckpointError(
            got=f"{path} without a model's config",
            expected='"model": {"type": "DecoderConfig", ...} or a ConvertedConfig',
            do="save the model again with save_model",
        )
    return config


def load_weights(model: LanguageModel, folder: Path | str, *, assign: bool = False) -> None:
    """Puts the weights of a saved model into a model of the same config.

    Args:
        model: As ``build(load_config(folder))`` makes it.
        folder: Of the saved model.
        assign: Make the tensors the model's own, dtype and all, rather than copy their numbers.

    Raises:
        CheckpointError: A file is missing or damaged, or does not fit the model.
    """
    folder = Path(folder)
    description = read_json(folder / "config.json", newest=FORMAT)
    tensors = load_tensors(folder / "model.safetensors", sha256_expected=description.get("sha256"))
    load_state(model, tensors, folder, assign=assign)


def load_state(
    model: LanguageModel, tensors: dict[str, torch.Tensor], where: Path, *, assign: bool = False
) -> None:
    """Puts tensors into a model, every one of them, with nothing left over.

    Args:
        model: Of the shape that the tensors were saved from.
        tensors: By name.
        where: Where they come from, for the message.
        assign: Make the tensors the model's own, dtype and all, rather than copy their numbers.

    Raises:
        CheckpointError: Names or shapes differ.
    """
    own = model.state_dict()
    wrong = sorted(own.keys() ^ tensors.keys()) or sorted(
        name for name, tensor in tensors.items() if tensor.shape != own[name].shape
    )
    if wrong:
        raise CheckpointError(
            got=f"{where}: {len(wrong)} tensors that do not fit the model, the first is {wrong[0]}",
            expected="the tensors of this very config",
            do="load it with the config that it was saved with",
        )
    model.load_state_dict(tensors, assign=assign)


def load_tensors(path: Path, *, sha256_expected: str | None) -> dict[str, torch.Tensor]:
    """Reads a safetensors file after checking that it is the one that was written.

    Raises:
        CheckpointError: Missing, truncated or changed.
    """
    if not path.is_file():
        raise CheckpointError(got=f"no file {path}", expected="saved tensors", do="check the folder's name")
    if sha256(path) != sha256_expected:
        raise CheckpointError(
            got=f"{path} with another checksum than its description",
            expected=f"sha256 {sha256_expected}",
            do="the file is truncated or changed: copy it again or use an older checkpoint",
        )
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            got=f"{path}: {error}", expected="a safetensors file", do="use an older checkpoint"
        ) from error


def read_json(path: Path, *, newest: int) -> dict[str, Any]:
    """Reads a versioned JSON object.

    Args:
        path: The file.
        newest: The newest format that is understood.

    Raises:
        NewerFormatError: It is of a newer format.
        CheckpointError: Missing, not readable, not JSON, or without a format.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(got=f"no file {path}", expected="a saved file", do="check the name") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            got=f"{path}: {error}", expected="JSON", do="the file is truncated or changed: copy it again"
        ) from error
    version = data.get("format") if isinstance(data, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(
            got=f"{path} with format {version!r}", expected=f'"format": 1 to {newest}', do="check the name"
        )
    if version > newest:
        raise NewerFormatError(
            got=f"{path} of format {version}",
            expected=f"at most {newest}, the newest that this version reads",
            do="update attention-residuals",
        )
    return dict(data)


def fingerprint(model: torch.nn.Module) -> str:
    """Returns what tells a model's weights from any others: the SHA-256 of their names and bits, in hexadecimal.

    Figures and sweeps carry it, so that nobody later has to guess which checkpoint they are of.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's bytes in hexadecimal.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        got=f"{path}: {error}",
        expected="a file that may be read",
        do="check what lies there and its permissions",
    )
