import subprocess
import sys
from pathlib import Path

import matplotlib
import pytest

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.plots import layer_profile, png_bytes, save


def figure():
    return layer_profile({"standard": [1.0, 2.0]}, y_label="RMS", title="Magnitude", footer="3 tokens")


def size(png):
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


def test_a_png_has_150_dots_for_each_inch(tmp_path):
    drawn = figure()
    save(drawn, tmp_path / "new" / "a.png")
    png = (tmp_path / "new" / "a.png").read_bytes()
    assert png == png_bytes(drawn)
    width, height = size(png)
    assert (width, height) == tuple(int(150 * inches) for inches in drawn.get_size_inches())


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_the_same_figure_gives_the_same_bytes_and_no_other_file(tmp_path, name):
    for folder in ("one", "two"):
        save(figure(), tmp_path / folder / name)
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert [file.name for file in (tmp_path / "one").iterdir()] == [name]


def test_an_svg_is_an_svg(tmp_path):
    save(figure(), tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


def test_settings_of_the_user_change_no_figure_and_stay_as_they_are():
    before = png_bytes(figure())
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 30, "savefig.facecolor": "red"}):
        assert png_bytes(figure()) == before
        assert matplotlib.rcParams["font.size"] == 30


@pytest.mark.parametrize("name", ["a.jpg", "a", "a.PNG.txt"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        save(figure(), tmp_path / name)


def test_an_existing_file_is_left_alone(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        save(figure(), path)
    assert path.read_text() == "mine"


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="while writing"):
        save(figure(), tmp_path / "file" / "a.png")


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(figure(), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_pyplot_is_never_imported():
    code = "import sys, attention_residuals.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
