"""Who may ask the local server, and what every answer says about its use."""

import ipaddress
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["DATA_POLICY", "Guard", "is_local", "name_of", "refused"]

DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
"""What a browser may do with an answer that is data: nothing."""

_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class Guard:
    """Lets in who knows the secret and comes from the page itself.

    Nothing is allowed across origins, and every answer forbids to be kept, framed or guessed at.

    Args:
        app: Answers requests for paths that begin with ``/SECRET``.
        secret: Letters, digits, ``-`` and ``_``.
        host: What the server is bound to. Requests must name it or this machine.
    """

    def __init__(self, app: ASGIApp, *, secret: str, host: str) -> None:
        self.app, self.secret, self.host = app, secret.encode(), host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or refuses it."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("content-security-policy", DATA_POLICY)
            await send(message)

        if scope["type"] != "http":
            raise ValueError(f"{scope['type']}, of which this server knows nothing")
        answer = self._refusal(scope) or self.app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        # A foreign name can be made to mean this machine (DNS rebinding), but its pages then send that name.
        if not self._is_own(name_of(host)):
            return refused(
                403, f"Host {host!r}", "this machine's", "open the address that attnres view printed"
            )
        secret = scope["path"].split("/", 2)[1] if scope["path"].startswith("/") else ""
        if not secrets.compare_digest(secret.encode("utf-8", "surrogatepass"), self.secret):
            return refused(
                403,
                "a path without the secret of this server",
                "the whole address that attnres view printed",
                "copy it from the terminal; every start makes a new one",
            )
        # Browsers send an Origin with every POST; a page of another site cannot send ours.
        if origin != f"http://{host}" and (origin is not None or scope["method"] not in ("GET", "HEAD")):
            return refused(403, f"Origin {origin!r}", f"http://{host}", "use the page of this server")
        return None

    def _is_own(self, name: str) -> bool:
        """Tells whether a Host names this server; the port may be another, as behind a tunnel."""
        if name in ("localhost", "127.0.0.1", "::1", self.host):
            return True
        # Bound to all addresses, it has names that it cannot know; an address cannot be rebound.
        return self.host in ("0.0.0.0", "::") and _is_address(name)


def name_of(host: str) -> str:
    """Takes the name out of a Host header; empty where there is none.

    Example:
        >>> name_of("LocalHost:80"), name_of("[::1]:80"), name_of("a:b:c"), name_of("a@b")
        ('localhost', '::1', '', 'a@b')
    """
    name, colon, port = host.lower().rpartition(":") if not host.endswith("]") else (host.lower(), "", "")
    if not colon:
        name = name or port
    elif not (port.isascii() and port.isdecimal()):
        return ""
    if name.startswith("[") and name.endswith("]"):
        return name[1:-1]
    return "" if ":" in name else name


def is_local(host: str) -> bool:
    """Tells whether nobody but this machine can reach what is bound to a host.

    Example:
        >>> is_local("127.0.0.1"), is_local("localhost"), is_local("::1"), is_local("0.0.0.0")
        (True, True, True, False)
    """
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def refused(status: int, got: str, expected: str, do: str) -> JSONResponse:
    """Makes an answer that says what was wrong with a request."""
    return JSONResponse({"got": got, "expected": expected, "do": do}, status)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
