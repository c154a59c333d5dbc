"""The package as a whole: what it exports, how it is built, and that it stays tidy."""

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import attention_residuals

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "attention_residuals"
MODULES = sorted(module.name for module in pkgutil.walk_packages([str(PACKAGE)], "attention_residuals."))


def public_objects():
    for name in MODULES:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            value = getattr(module, public)
            if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == name:
                yield f"{name}.{public}", value


@pytest.mark.parametrize("name", ["attention_residuals", *MODULES])
def test_all_names_what_exists(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        assert hasattr(module, public)
    assert len(set(module.__all__)) == len(module.__all__)


def test_top_level_names_are_those_of_all():
    public = {
        name
        for name, value in vars(attention_residuals).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public | {"presets", "__version__"} == set(attention_residuals.__all__)


@pytest.mark.parametrize(
    ("name", "value"), list(public_objects()), ids=lambda item: item if isinstance(item, str) else ""
)
def test_a_public_name_is_documented(name, value):
    assert value.__doc__
    assert not value.__doc__.startswith(f"{value.__name__}(")


def test_files_stay_small():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path


def test_the_readmes_tree_is_the_files():
    tree = re.search(r"```\nsrc/attention_residuals/\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    named = {line.split()[0].rstrip("/") for line in tree[1].splitlines()}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert named == folders


def test_importing_the_package_imports_no_plots_and_no_transformers():
    code = "import sys, attention_residuals; print({'matplotlib', 'transformers', 'datasets'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_the_wheel_holds_everything_and_runs_outside_of_the_source_tree(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, capture_output=True, timeout=300, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")}
    assert sources <= set(names)
    assert "attention_residuals/py.typed" in names

    target = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(install, capture_output=True, timeout=300, check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    code = (
        "import torch, attention_residuals as a; print(a.__file__);"
        "print(a.Decoder(a.presets.scaled(2, vocab_size=300))(torch.tensor([[1, 2]])).shape)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True,
                          text=True, timeout=120, check=True)  # fmt: skip
    where, shape = done.stdout.splitlines()
    assert Path(where).is_relative_to(target)
    assert shape == "torch.Size([1, 2, 300])"
    help_text = subprocess.run([str(target / "bin" / "attnres"), "--help"], cwd=tmp_path, env=environment,
                               capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    assert "demo" in help_text.stdout
