"""What the words of a command line mean: rules, texts, devices, run folders."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from tyro.conf import Positional, arg

from attention_residuals.configs import decode
from attention_residuals.csv_text import csv_text
from attention_residuals.data import (
    HuggingFaceDataset,
    Shakespeare,
    StandardLibrary,
    TextFiles,
    TextSource,
    Tokenizer,
)
from attention_residuals.errors import ConfigError, DataError, nearest
from attention_residuals.layers.residual import RULES, AttnRes, ResidualConfig
from attention_residuals.models import MODEL_CONFIGS, LanguageModel, load_model
from attention_residuals.models.weights import read_json
from attention_residuals.train import (
    TRAIN_CONFIGS,
    TrainConfig,
    load_checkpoint_model,
    load_run,
    newest_checkpoint,
)

__all__ = [
    "BUNDLED",
    "Folder",
    "Opened",
    "Text",
    "Words",
    "config_of",
    "csv_of",
    "device_of",
    "encoded",
    "folder_and_text",
    "model_folder_of",
    "name_of",
    "opened",
    "residual_of",
    "run_folder_of",
    "source_of",
    "text_of",
    "value_of",
]

Words = Annotated[Positional[tuple[str, ...]], arg(metavar="[FOLDER] TEXT", help_behavior_hint="")]
"""What ``folder_and_text`` takes."""

Folder = Annotated[Positional[Path], arg(metavar="FOLDER")]
"""The folder of a model, for ``opened``."""

Text = Annotated[Positional[str], arg(metavar="TEXT")]
"""What a model reads."""

BUNDLED = Path(__file__).parent.parent / "bundled"
"""The folder of the model that comes with this package."""


def residual_of(text: str, block: ResidualConfig) -> ResidualConfig:
    """Reads the name of a residual rule, with options; ``block`` alone is the preset's.

    Raises:
        ConfigError: There is no such rule, or it has no such option.
    """
    name, _, options = text.partition(":")
    if name == "block" and options.isdecimal():
        return AttnRes(sublayers_per_block=int(options))
    if text == "block":
        return block
    if text == "full":
        return AttnRes(sublayers_per_block=1)
    if name not in RULES:
        raise ConfigError(
            got=f"residual {text!r}",
            expected=f"full, block, block:S or one of {', '.join(RULES)}",
            do=nearest(name, ("full", "block", *RULES)),
        )
    pairs = [tuple(map(str.strip, option.partition("=")[::2])) for option in options.split(",") if option]
    values = {key: value_of(value) for key, value in pairs}
    if len(values) < len(pairs) or "type" in values:
        raise ConfigError(
            got=f"residual {text!r}", expected="each option of the rule once", do="see `attnres rules`"
        )
    config: ResidualConfig = decode({"type": RULES[name].__name__, **values}, MODEL_CONFIGS)
    return config


def value_of(text: str) -> object:
    """Reads an option's value as Python or JSON writes it: a number, a truth or nothing, or else a word."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def source_of(text: str, separator: str | None = None) -> TextSource:
    """Reads the name of a source of text, or a path; a lone file is cut at empty lines unless told otherwise.

    Raises:
        ConfigError: Neither a known name nor an existing path.
    """
    names: dict[str, TextSource] = {"standard-library": StandardLibrary(), "shakespeare": Shakespeare()}
    if text in names:
        return names[text]
    if text.startswith("hub:"):
        return HuggingFaceDataset(path=text.removeprefix("hub:"))
    path = Path(text)
    if path.exists() or len(path.parts) > 1 or path.suffix:
        # A path that is gone by now must read as it did when its run began.
        is_file = path.is_file() if path.exists() else bool(path.suffix)
        cut = "\n\n" if is_file else ""
        return TextFiles(path=text, separator=cut if separator is None else separator)
    raise ConfigError(
        got=f"source {text!r}",
        expected="a known name, hub:OWNER/NAME or an existing path",
        do=nearest(text, names),
    )


def text_of(path: Path) -> str:
    """Reads a UTF-8 text file.

    Raises:
        DataError: It is none.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            got=f"{path}: {error}", expected="a UTF-8 text file", do="name another file"
        ) from error


def config_of(path: Path) -> TrainConfig:
    """Reads the config of a run from its folder or its config.json.

    Raises:
        ConfigError: There is none, or it holds what no config holds.
    """
    file = run_folder_of(path) / "config.json" if path.is_dir() else path
    config = decode(read_json(file, newest=1).get("train"), TRAIN_CONFIGS)
    if not isinstance(config, TrainConfig):
        raise ConfigError(got=f"{file} without a TrainConfig", expected="a run's config.json", do="name one")
    return config


def device_of(name: str) -> str:
    """Chooses the device.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(got="device cuda", expected="a device that is here", do="pass --device cpu or auto")
    return name


def name_of(folder: Path) -> str:
    """Names the model in a folder, for people."""
    bundled = folder == BUNDLED or (folder == Path("bundled") and not folder.exists())
    return "the bundled model" if bundled else folder.resolve().name


_FORMULAS = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
"""What a formula starts with in a spreadsheet; the last four are wide forms of the first four."""


def csv_of(lines: Sequence[Sequence[str]]) -> str:
    """Writes lines of cells as the text of a CSV file.

    A text that a spreadsheet would run gets an apostrophe, as in files of the page.
    """
    return csv_text(map(_plain, cells) for cells in lines)


def _plain(cell: str) -> str:
    return f"'{cell}" if cell.startswith(_FORMULAS) and not _is_number(cell) else cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def run_folder_of(folder: Path) -> Path:
    """Finds the run in a folder that ``attnres train`` wrote, or takes the run's own folder."""
    return folder / "run" if (folder / "run").is_dir() else folder


def encoded(text: str, tokenizer: Tokenizer) -> torch.Tensor:
    """Turns a text into tokens after an end of text, as documents begin in training."""
    return torch.tensor([tokenizer.end_of_text, *tokenizer.encode(text)])


class Opened(NamedTuple):
    """A model in a folder, whoever wrote it."""

    folder: Path
    model: LanguageModel
    tokenizer: Tokenizer
    training: TrainConfig | None
    """What ``attnres train`` was started with; None for a folder that ``attnres convert`` wrote."""


def folder_and_text(words: tuple[str, ...]) -> tuple[Path, str]:
    """Splits the words of a command: a folder and a text, or the text alone for the bundled model.

    Raises:
        ConfigError: No words, more than two, or the name of a model's folder alone.
    """
    if len(words) == 1 and (run_folder_of(Path(words[0])) / "tokenizer.json").is_file():
        raise ConfigError(
            got=f"{words[0]}, a model, and no text",
            expected="a folder, then a text",
            do="put the text behind it",
        )
    if len(words) not in (1, 2):
        raise ConfigError(
            got=f"{len(words)} words", expected="[FOLDER] TEXT", do="put the text in quotation marks"
        )
    return (BUNDLED if len(words) == 1 else Path(words[0])), words[-1]


def opened(folder: Path, device: str) -> Opened:
    """Reads the model and the tokenizer in a folder that ``attnres train`` or ``attnres convert`` wrote.

    The name ``bundled`` is that of the model that comes with the package, unless there is such a folder.

    Raises:
        CheckpointError: There is no model, or a file is damaged.
        DataError: There is no tokenizer.
    """
    if folder == Path("bundled") and not folder.exists():
        folder = BUNDLED
    folder = run_folder_of(folder)
    if (folder / "model.safetensors").exists():
        model, training = load_model(folder), None
    else:
        training, model = load_run(folder).config, load_checkpoint_model(folder)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise DataError(
            got=f"{folder} without tokenizer.json",
            expected="the folder of a model, with the tokenizer that it was trained with",
            do="copy tokenizer.json from where the model was trained or converted",
        )
    return Opened(folder, model.to(device), Tokenizer.load(tokenizer), training)


def model_folder_of(folder: Path) -> Path:
    """Finds the folder that holds a model's weights: the folder itself, or a run's newest checkpoint.

    Raises:
        ConfigError: There is none.
    """
    folder = run_folder_of(folder)
    if (folder / "model.safetensors").exists():
        return folder
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        raise ConfigError(
            got=f"{folder} without a model",
            expected="a folder that attnres train or attnres convert wrote",
            do="convert or train a model first",
        )
    if not (checkpoint / "model.safetensors").exists():
        raise ConfigError(
            got=f"{folder}, whose checkpoints several processes have written, each its part",
            expected="a model in one piece",
            do=f"attnres export {folder} and another folder, and name that one",
        )
    return checkpoint
