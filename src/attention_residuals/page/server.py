"""The local server of the live page: the page, what it may ask, and how answers come back."""

import asyncio
import json
import re
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from attention_residuals.errors import AttentionResidualsError, ConfigError
from attention_residuals.page.guard import Guard, refused
from attention_residuals.page.jobs import ENDS, Event, Job, Jobs, QueueFullError, Work
from attention_residuals.page.session import KINDS, Session

__all__ = ["MAX_BODY", "RequestError", "Server", "TooLargeError", "application", "listener"]

MAX_BODY = 64 * 1024
"""Bytes of the largest request."""

_OWN_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')
"""What the page allows itself: scripts and styles by their hashes."""


class RequestError(AttentionResidualsError, ValueError):
    """A request that is no JSON, or without what every request has."""


class TooLargeError(AttentionResidualsError, ValueError):
    """A request of too many bytes."""


_STATUS = {QueueFullError: 429, TooLargeError: 413, RequestError: 415}


def application(session: Session, jobs: Jobs, *, secret: str, host: str = "127.0.0.1") -> Guard:
    """Makes the application: the page at ``/SECRET/``, and below it what the page asks.

    ``POST trace``, ``generate`` and ``compare`` take the session's fields and ``client``, a name that the
    page gives itself, as JSON. They answer with the events of the job, one JSON object a line; who closes
    the connection cancels the job. ``POST cancel`` drops all jobs of a ``client``. No file is served.

    Args:
        session: Computes.
        jobs: The queue.
        secret: The first part of every path: letters, digits, ``-`` and ``_``.
        host: What the server is bound to.

    Raises:
        AttentionResidualsError: The model cannot show even the example.
    """
    first = session.first_page()
    own = _OWN_POLICY.search(first)
    assert own is not None
    policy = f"{own[1]}; frame-ancestors 'none'"

    async def page(request: Request) -> Response:
        return HTMLResponse(first, headers={"content-security-policy": policy})

    async def about(request: Request) -> Response:
        return JSONResponse(session.about())

    async def ask(request: Request) -> "_Answer":  # which is an application, as Starlette's responses are
        kind = request.url.path.rpartition("/")[2]
        client, fields = await _fields(request)
        return _Answer(jobs, owner=client, kind=kind, work=session.work(kind, fields))

    async def cancel(request: Request) -> Response:
        client, _ = await _fields(request)
        return JSONResponse({"cancelled": jobs.cancel(lambda job: job.owner == client)})

    routes = [
        Route(f"/{secret}/", page),
        Route(f"/{secret}/about", about),
        Route(f"/{secret}/cancel", cancel, methods=["POST"]),
        *(Route(f"/{secret}/{kind}", ask, methods=["POST"]) for kind in KINDS),
    ]
    handlers: dict[Any, Any] = {
        AttentionResidualsError: _answer_error,
        ClientDisconnect: _answer_nobody,
        HTTPException: _answer_http_error,
    }
    return Guard(Starlette(routes=routes, exception_handlers=handlers), secret=secret, host=host)


async def _fields(request: Request) -> tuple[str, dict[str, Any]]:
    """Reads who asks, and what."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    declared = request.headers.get("content-length", "0")
    body = b""
    if not declared.isdecimal() or int(declared[:9]) <= MAX_BODY:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                break
    if len(body) > MAX_BODY or (declared.isdecimal() and int(declared[:9]) > MAX_BODY):
        raise TooLargeError(
            got=f"a request of more than {MAX_BODY // 1024} KiB",
            expected="a smaller one",
            do="shorten the text",
        )
    try:
        fields = json.loads(body, parse_int=_whole) if kind == "application/json" else None
    except (ValueError, RecursionError):  # of lists in lists in lists
        fields = None
    client = fields.pop("client", None) if isinstance(fields, dict) else None
    if not isinstance(fields, dict) or not isinstance(client, str) or not 0 < len(client) <= 64:
        raise RequestError(
            got=f"{len(body)} bytes of type {kind!r}",
            expected='application/json: an object with "client", a name of 1 to 64 characters',
            do="use the page of this server",
        )
    return client, fields


def _whole(digits: str) -> int:
    """Reads a whole number that fits into a tensor."""
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**63:
        raise ValueError(digits)
    return int(digits)


class _Answer:
    """Submits a job, and sends its events as lines while the asker listens."""

    def __init__(self, jobs: Jobs, *, owner: str, kind: str, work: Work) -> None:
        loop = asyncio.get_running_loop()
        self._jobs = jobs
        self._lines: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()

        def tell(event: Event) -> None:
            line = json.dumps(event, allow_nan=False, separators=(",", ":")) + "\n"
            loop.call_soon_threadsafe(self._lines.put_nowait, (line.encode(), event["type"] in ENDS))

        self._job = Job(owner=owner, kind=kind, work=work, tell=tell)
        jobs.submit(self._job)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            done, _ = await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # or what went wrong
        finally:
            leaving.cancel()
            sending.cancel()
            self._jobs.cancel(lambda job: job is self._job)

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ended = False
        while not ended:
            line, ended = await self._lines.get()
            await send({"type": "http.response.body", "body": line, "more_body": not ended})


async def _left(receive: Receive) -> None:
    """Returns when the asker has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer_error(request: Request, error: AttentionResidualsError) -> JSONResponse:
    return refused(_STATUS.get(type(error), 400), error.got, error.expected, error.do)


async def _answer_http_error(request: Request, error: HTTPException) -> JSONResponse:
    return refused(
        error.status_code, f"{request.method} of {error.detail}", "what the page asks", "use the page"
    )


async def _answer_nobody(request: Request, error: ClientDisconnect) -> Response:
    """Whoever left in the middle of a request hears nothing; that is no fault to show in the terminal."""
    return Response(status_code=400)


def listener(host: str, port: int) -> socket.socket:
    """Binds a socket, so that requests wait from now on.

    Args:
        host: An address or a name of this machine.
        port: 0 takes a free one.

    Raises:
        ConfigError: It cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not host:
            raise OSError("it has no name, and would be every address of this machine: 0.0.0.0 says so")
        if not 0 <= port < 2**16:
            raise OSError("there is no such port")
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            got=f"--host {host} --port {port}: {error}",
            expected="an address of this machine and a free port",
            do="leave --port out to take any free one, and --host for this machine alone",
        ) from error


class Server(uvicorn.Server):
    """A server that ends what runs before it waits for answers to end.

    Args:
        app: The application.
        jobs: Its queue.
    """

    def __init__(self, app: Guard, jobs: Jobs) -> None:
        self.jobs = jobs
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,  # it would show the secret
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=2,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancels all jobs, and ends."""
        await asyncio.to_thread(self.jobs.close)
        await super().shutdown(sockets)
