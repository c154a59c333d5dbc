"""A prepared corpus: token files, their tokenizer, and a manifest that says exactly what is in them."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from attention_residuals.data.tokenizer import Tokenizer
from attention_residuals.errors import DataError

__all__ = ["SCORED_VERSION", "SPLITS", "VERSION", "Corpus", "sha256"]

VERSION = 1
"""Version of the folder's format; a reader refuses every newer one."""

SCORED_VERSION = 2
"""Version of a folder where not all tokens are scored: for readers of version 1, all were."""

SPLITS = ("train", "valid")
"""Names of the splits and of their token files."""

_KEYS = {"source", "options", "dtype", "vocab_size", "tokenizer_sha256", "splits", "documents"}
_ITEM_SIZES = {"<u2": 2, "<u4": 4}


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """Tokens of a training and a validation split, read from a folder that ``prepare`` wrote.

    Args:
        folder: Where it lies.
        manifest: What ``manifest.json`` says: source, licence, options, documents, counts, hashes.
        tokenizer: What turned its texts into tokens.
        train: Training tokens in a row, on disk, read-only; each document starts with the tokenizer's end of text.
        valid: Validation tokens, likewise.
        train_scored: For each training token whether it counts in the loss; None where all do.
        valid_scored: The same for the validation tokens.

    Example:
        >>> Corpus.load("no/such/folder")
        Traceback (most recent call last):
        ...
        attention_residuals.errors.DataError: got: no/such/folder, which holds no manifest.json
        expected: a folder that prepare wrote
        do: prepare(StandardLibrary(), 'no/such/folder')
    """

    folder: Path
    manifest: dict[str, Any] = field(repr=False)
    tokenizer: Tokenizer
    train: npt.NDArray[np.unsignedinteger[Any]] = field(repr=False)
    valid: npt.NDArray[np.unsignedinteger[Any]] = field(repr=False)
    train_scored: npt.NDArray[np.bool_] | None = field(repr=False, default=None)
    valid_scored: npt.NDArray[np.bool_] | None = field(repr=False, default=None)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocab_size

    @classmethod
    def load(cls, folder: str | Path) -> "Corpus":
        """Opens a prepared folder; its tokens stay on disk, and unchecked, until ``verify`` reads them.

        Raises:
            DataError: The folder was not prepared, is damaged, or was written by a newer version.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
        try:
            train, valid = (_open_tokens(folder, split, manifest) for split in SPLITS)
            train_scored, valid_scored = (_open_scored(folder, split, manifest) for split in SPLITS)
            intact = sha256((folder / "tokenizer.json").read_bytes()) == manifest["tokenizer_sha256"]
        except (KeyError, TypeError) as error:
            raise _damaged(folder, f"manifest.json garbles its splits or dtype ({error})") from error
        if not intact:
            raise _damaged(folder, "tokenizer.json is not the one that made the tokens")
        return cls(
            folder=folder,
            manifest=manifest,
            tokenizer=tokenizer,
            train=train,
            valid=valid,
            train_scored=train_scored,
            valid_scored=valid_scored,
        )

    def verify(self) -> None:
        """Reads every token once and checks that it is what ``prepare`` wrote.

        Raises:
            DataError: A token file was changed, or holds an id that the tokenizer does not have.
        """
        for split, tokens in (("train", self.train), ("valid", self.valid)):
            if hashlib.sha256(tokens.data).hexdigest() != self.manifest["splits"][split].get("sha256"):
                raise _damaged(self.folder, f"{split}.bin has another checksum than the manifest says")
            largest = int(tokens.max())
            if largest >= self.vocab_size:
                raise _damaged(
                    self.folder,
                    f"{split}.bin holds id {largest}, and the tokenizer only has ids below {self.vocab_size}",
                )
        for split, scored in (("train", self.train_scored), ("valid", self.valid_scored)):
            about = self.manifest["splits"][split]
            if scored is not None and hashlib.sha256(scored.data).hexdigest() != about["scored_sha256"]:
                raise _damaged(self.folder, f"{split}.scored.bin has another checksum than the manifest says")


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: Any = json.loads((folder / "manifest.json").read_bytes())
    except OSError as error:
        raise DataError(
            got=f"{folder}, which holds no manifest.json",
            expected="a folder that prepare wrote",
            do=f"prepare(StandardLibrary(), {str(folder)!r})",
        ) from error
    except ValueError as error:
        raise _damaged(folder, f"manifest.json is no JSON: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("version"), int):
        raise _damaged(folder, "manifest.json names no version")
    if manifest["version"] not in (VERSION, SCORED_VERSION):
        raise DataError(
            got=f"{folder} in version {manifest['version']} of the format",
            expected=f"version {VERSION} or {SCORED_VERSION}",
            do="update attention-residuals, or prepare the corpus again into another folder",
        )
    if missing := _KEYS - manifest.keys():
        raise _damaged(folder, f"manifest.json lacks {', '.join(sorted(missing))}")
    return manifest


def _open_tokens(folder: Path, split: str, manifest: dict[str, Any]) -> npt.NDArray[Any]:
    path, dtype = folder / f"{split}.bin", manifest["dtype"]
    expected = manifest["splits"][split]["tokens"] * _ITEM_SIZES[dtype]
    size = path.stat().st_size if path.exists() else 0
    if size != expected or not size:
        raise _damaged(folder, f"{split}.bin has {size} bytes where the manifest says {expected}")
    return np.memmap(path, dtype=dtype, mode="r")


def _open_scored(folder: Path, split: str, manifest: dict[str, Any]) -> npt.NDArray[np.bool_] | None:
    if manifest["version"] != SCORED_VERSION:
        return None
    path, expected = folder / f"{split}.scored.bin", manifest["splits"][split]["tokens"]
    size = path.stat().st_size if path.exists() else 0
    if size != expected:
        raise _damaged(folder, f"{split}.scored.bin has {size} bytes where the manifest says {expected}")
    return np.memmap(path, dtype=np.bool_, mode="r")


def _damaged(folder: Path, why: str) -> DataError:
    return DataError(
        got=f"{folder}: {why}",
        expected="a folder as prepare wrote it",
        do="delete it and prepare the corpus again",
    )


def sha256(raw: bytes) -> str:
    """Hashes bytes, as 64 hexadecimal digits.

    Example:
        >>> sha256(b"")[:8]
        'e3b0c442'
    """
    return hashlib.sha256(raw).hexdigest()
