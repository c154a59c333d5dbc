"""``attnres view``: the server as it is started and ended, on a real port."""

import http.client
import inspect
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from page.live_model import folder_of_a_model

import attention_residuals
from attention_residuals.cli import main, names, view
from attention_residuals.errors import ConfigError
from attention_residuals.page.guard import Guard
from attention_residuals.page.jobs import Jobs
from attention_residuals.page.server import Server, application, listener
from attention_residuals.page.session import Session

SECONDS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # Large enough for a generation that lasts until it is ended.
    return folder_of_a_model(tmp_path_factory.mktemp("models") / "tiny", max_tokens=4096, num_layers=12)


class Viewed:
    """The command in a process of its own."""

    def __init__(self, folder):
        command = [sys.executable, "-m", "attention_residuals.cli", "view", str(folder), "--no-open"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = [self.process.stdout.readline() for _ in range(3)]
        self.printed = "".join(lines)
        self.url = lines[1].strip()
        self.port, self.secret = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{43})/", self.url).groups()

    @contextmanager
    def asked(self, kind, **fields):
        headers = {"content-type": "application/json", "origin": f"http://127.0.0.1:{self.port}"}
        with closing(http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=SECONDS)) as connection:
            connection.request(
                "POST", f"/{self.secret}/{kind}", json.dumps({"client": "me", **fields}), headers
            )
            yield connection.getresponse()

    def raw(self, text):
        with socket.create_connection(("127.0.0.1", int(self.port)), timeout=SECONDS) as sent:
            sent.sendall(text.encode("latin-1"))
            return sent.makefile("rb").read().decode("latin-1")

    def interrupted(self):
        """Presses Ctrl-C; returns what was printed."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=SECONDS)
        # A line's end after ^C; not where whoever started the tests has Ctrl-C ignored, as nohup does.
        return out, err.removesuffix("\n")


@pytest.fixture(scope="module")
def viewed(folder):
    found = Viewed(folder)
    yield found
    printed = found.interrupted()  # while it is idle
    assert (found.process.returncode, printed) == (0, ("", ""))


def test_the_page_is_at_the_address_that_is_printed(viewed):
    assert viewed.printed.startswith("tiny is at\nhttp://127.0.0.1:")
    assert viewed.printed.endswith("Ctrl-C ends it.\n")
    answer = viewed.raw(
        f"GET /{viewed.secret}/ HTTP/1.1\r\nHost: 127.0.0.1:{viewed.port}\r\nConnection: close\r\n\r\n"
    )
    assert answer.startswith("HTTP/1.1 200 ")
    assert "<!DOCTYPE html>" in answer
    assert "\r\nserver:" not in answer.lower()


@pytest.mark.parametrize(
    "path",
    ["../../../../../../etc/passwd", "/etc/passwd", "%2e%2e/%2e%2e/%2e%2e/etc/passwd", "..%2f..%2fetc%2fpasswd",
     "..\\..\\etc\\passwd", "assets/../../config.json", "\xff"],
)  # fmt: skip
@pytest.mark.parametrize("start", ["/SECRET/", "/", ""])
def test_no_path_leads_to_a_file(viewed, start, path):
    target = start.replace("SECRET", viewed.secret) + path
    answer = viewed.raw(
        f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{viewed.port}\r\nConnection: close\r\n\r\n"
    )
    assert re.match(r"HTTP/1\.1 (400|403|404) ", answer)
    assert "root:" not in answer
    assert "vocab_size" not in answer


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: evil.example\r\n", 403),
        ("", 400),
        ("Host: 127.0.0.1\r\nHost: evil.example\r\n", 400),
        ("Host: evil.example\r\nX-Forwarded-Host: 127.0.0.1\r\n", 403),
        ("Host: 127.0.0.1\r\nOrigin: http://evil.example\r\n", 403),
    ],
)
def test_foreign_headers_are_refused(viewed, headers, status):
    answer = viewed.raw(f"GET /{viewed.secret}/about HTTP/1.1\r\n{headers}Connection: close\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert "max_tokens" not in answer


def test_a_request_that_claims_to_be_huge_is_answered_without_being_read(viewed):
    origin = f"http://127.0.0.1:{viewed.port}"
    answer = viewed.raw(
        f"POST /{viewed.secret}/trace HTTP/1.1\r\nHost: 127.0.0.1:{viewed.port}\r\nOrigin: {origin}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {10**12}\r\nConnection: close\r\n\r\n"
    )
    assert answer.startswith("HTTP/1.1 413 ")


def test_ctrl_c_ends_a_server_with_a_pass_running(folder):
    viewed = Viewed(folder)
    with viewed.asked("generate", text="the cat", max_new_tokens=1024) as answer:
        assert [json.loads(answer.readline())["type"] for _ in range(3)] == ["started", "token", "token"]
        printed = viewed.interrupted()
        assert json.loads(answer.read().splitlines()[-1]) == {"type": "cancelled"}
    assert (viewed.process.returncode, printed) == (0, ("", ""))


def test_who_closes_the_connection_cancels_the_job(folder):
    model_is_running, ended = threading.Event(), threading.Event()

    class Waiting(Session):
        def work(self, kind, fields):
            work = super().work(kind, fields)
            return work if kind == "trace" else forever

    def forever(check):
        model_is_running.set()
        try:
            while True:
                check()
                time.sleep(0.001)
        finally:
            ended.set()
        yield

    opened, jobs = view.opened(folder, "cpu"), Jobs()
    session = Waiting(view.Engine(opened.model, opened.tokenizer), "tiny")
    with listener("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        server = Server(application(session, jobs, secret="s"), jobs)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        body = b'{"client": "me", "text": "the cat"}'
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as sent:
            sent.sendall(
                f"POST /s/generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nOrigin: http://127.0.0.1:{port}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            assert model_is_running.wait(SECONDS)
            assert not ended.is_set()
        assert ended.wait(SECONDS)
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


@pytest.fixture
def started(monkeypatch):
    """What the command would run, without running it."""
    found = {"opened": threading.Event()}

    def run(server, sockets):
        found.update(app=server.config.app, address=sockets[0].getsockname())
        raise KeyboardInterrupt

    def browse(url):
        found["url"] = url
        found["opened"].set()

    monkeypatch.setattr(Server, "run", run)
    monkeypatch.setattr(webbrowser, "open", browse)
    return found


def test_the_browser_is_opened_unless_told_otherwise(folder, started, capsys):
    assert main(["view", str(folder)]) == 0
    assert started["opened"].wait(SECONDS)
    printed = capsys.readouterr()
    assert started["url"] in printed.out.splitlines()
    assert started["address"][0] == "127.0.0.1"
    assert isinstance(started["app"], Guard)
    assert "other machines" not in printed.err
    started["opened"].clear()
    assert main(["view", str(folder), "--no-open"]) == 0
    assert not started["opened"].is_set()


def test_each_start_has_another_secret(folder, started, capsys):
    secrets = set()
    for _ in range(2):
        main(["view", str(folder), "--no-open"])
        secrets.add(capsys.readouterr().out.splitlines()[1].split("/")[3])
    assert len(secrets) == 2
    assert all(len(secret) >= 43 for secret in secrets)


def test_letting_other_machines_in_is_warned_of(folder, started, capsys):
    assert main(["view", str(folder), "--no-open", "--host", "0.0.0.0"]) == 0
    printed = capsys.readouterr()
    assert "lets other machines in" in printed.err
    assert "http://127.0.0.1:" in printed.out
    assert started["address"][0] == "0.0.0.0"


def test_a_port_that_is_taken_and_a_host_that_is_none_are_told(folder, started, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["view", str(folder), "--no-open", "--port", port]) == 2
    assert f"--port {port}" in capsys.readouterr().err
    assert main(["view", str(folder), "--no-open", "--port", "99999"]) == 2
    assert main(["view", str(folder), "--no-open", "--host", "no.such.host.invalid"]) == 2
    assert "leave --port out" in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.setattr(view, "find_spec", lambda name: None)
    assert main(["view", str(folder)]) == 2
    printed = capsys.readouterr().err
    assert "no starlette and no uvicorn" in printed
    assert 'pip install "attention-residuals[view]"' in printed


def test_the_default_is_the_bundled_model(folder, started, monkeypatch, tmp_path, capsys):
    parameters = inspect.signature(view.view_command).parameters
    assert parameters["folder"].default == view.BUNDLED
    assert view.BUNDLED.parent == Path(attention_residuals.__file__).parent
    monkeypatch.setattr(view, "BUNDLED", folder)
    monkeypatch.setattr(names, "BUNDLED", folder)
    assert view.view_command(folder, open_browser=False) == 0
    assert capsys.readouterr().out.startswith("the bundled model is at\n")
    monkeypatch.setattr(view, "BUNDLED", tmp_path / "none")
    with pytest.raises(ConfigError, match="no model in this package"):
        view.view_command(view.BUNDLED)


def test_a_folder_without_a_model_is_told(started, tmp_path, capsys):
    assert main(["view", str(tmp_path), "--no-open"]) == 1
    assert "do:" in capsys.readouterr().err
