"""The command that shows a model in a browser, live."""

import secrets
import sys
import threading
import webbrowser
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from attention_residuals.cli.app import Device, command
from attention_residuals.cli.names import BUNDLED, device_of, name_of, opened
from attention_residuals.errors import ConfigError
from attention_residuals.inference import Engine

__all__ = ["view_command"]


@command("view")
def view_command(
    folder: Annotated[Positional[Path], arg(metavar="[FOLDER]", help_behavior_hint="")] = BUNDLED,
    host: str = "127.0.0.1",
    port: int = 0,
    open_browser: Annotated[bool, arg(name="open")] = True,
    device: Device = "auto",
) -> int:
    """Look at a model live in a browser: type, see what it reads, change that, generate, compare.

    Starts a server on this machine alone, prints its address, and runs until Ctrl-C. The address holds a
    secret, without which nobody gets an answer: do not pass it on.

    For example:
      attnres view
      attnres view runs/block --port 8000 --no-open

    Args:
        folder: A folder written by attnres train or attnres convert; by default the model of this package.
        host: The address to bind. Another than 127.0.0.1 lets other machines in, unencrypted.
        port: 0 takes a free one.
        open_browser: Open the page in the browser.
        device: auto is cuda where there is one.
    """
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            got=f"no {' and no '.join(missing)}",
            expected="what the server is made of",
            do='pip install "attention-residuals[view]"',
        )
    if folder == BUNDLED and not folder.is_dir():
        raise ConfigError(
            got="no folder, and no model in this package",
            expected="the folder of a model",
            do="name one that attnres train or attnres convert wrote",
        )
    from attention_residuals.page.guard import is_local
    from attention_residuals.page.jobs import Jobs
    from attention_residuals.page.server import Server, application, listener
    from attention_residuals.page.session import Session

    with listener(host, port) as bound:
        _, model, tokenizer, _ = opened(folder, device_of(device))
        session = Session(Engine(model.requires_grad_(False), tokenizer), name_of(folder))
        secret, jobs = secrets.token_urlsafe(32), Jobs()
        server = Server(application(session, jobs, secret=secret, host=host), jobs)
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        url = f"http://{shown}:{bound.getsockname()[1]}/{secret}/"
        if not is_local(host):
            print(
                f"attnres: --host {host} lets other machines in. Whoever sees the address below can use the "
                "model, and nothing is encrypted.",
                file=sys.stderr,
            )
        print(f"{session.name} is at\n{url}\nCtrl-C ends it.", flush=True)
        if open_browser:  # in a thread, for a browser in the terminal keeps its caller waiting
            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
        try:
            server.run(sockets=[bound])
        except KeyboardInterrupt:  # the way to end it
            print(file=sys.stderr)
    return 0
