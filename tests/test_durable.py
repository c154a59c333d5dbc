import errno
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from attention_residuals.durable import PARTIAL, remove_partials, unwritable, write_bytes, write_new
from attention_residuals.errors import CheckpointError


def test_many_writers_of_one_file_do_not_disturb_one_another(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([number]) * 100_000 for number in range(8)]
    with ThreadPoolExecutor(len(contents)) as pool:
        for _ in range(5):
            list(pool.map(lambda content: write_bytes(path, content), contents))
            assert path.read_bytes() in contents
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_removed(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def dies(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", dies)
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        with pytest.raises(Killed):
            write_bytes(tmp_path / "file", b"half")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(PARTIAL)
    (tmp_path / f"{PARTIAL}folder" / "inner").mkdir(parents=True)
    remove_partials(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "do"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "change its permissions"),
        (errno.EEXIST, "move away what has that name"),
        (errno.ENOTDIR, "move away what has that name"),
        (errno.EISDIR, "move away what has that name"),
        (errno.ENOENT, "see who removed it"),
        (errno.EIO, "see the cause above"),
    ],
)
def test_advice_follows_the_cause(tmp_path, number, do):
    error = unwritable(tmp_path, OSError(number, os.strerror(number)))
    assert f"{os.strerror(number)} while writing {tmp_path}" in error.got
    assert error.do.startswith(do)
    assert ("space" in error.do) == (number == errno.ENOSPC)


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="move away what has that name"):
        write_new(tmp_path / "file" / "new", b"")
