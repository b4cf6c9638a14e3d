"""Server of ``raypipe ui``: who may ask, what may be asked for, and the answers.

An address names a run by a key: no text of a request is ever a path.
"""

from __future__ import annotations

import gc
import hashlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from raypipe.errors import ConfigError
from raypipe.redaction import without_credentials
from raypipe.ui.address import listen
from raypipe.ui.pages import Pages, policy

#: the names of this machine, for itself
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
#: what the policy of an answer forbids, and that of a page cannot
_ALONE = "; base-uri 'none'; frame-ancestors 'none'"
_SECONDS = 2  # for which the end waits for answers


def serve(locations: Sequence[str], host: str, port: int) -> None:
    """Say where, and answer requests until the process is interrupted.

    Raises:
        ConfigError: a folder cannot be read, or the address cannot be used.

    """
    pages = Pages(locations)
    count = len(pages.runs())
    token = "" if _is_loopback(host) else secrets.token_urlsafe(24)
    listener = listen(host, port)
    number = listener.getsockname()[1]
    name = socket.gethostname() if token else f"[{host}]" if ":" in host else host
    query = f"?token={token}" if token else ""
    print(f"raypipe ui: http://{name}:{number}/{query} ({count} runs; Ctrl-C ends it)", flush=True)
    answer(pages, listener, token, name)


def answer(pages: Pages, listener: socket.socket, token: str = "", name: str = "localhost") -> None:
    """Answer requests at a socket until the process is interrupted; see :func:`application`."""
    config = uvicorn.Config(
        application(pages, token, name), log_level="warning", access_log=False, lifespan="off",
        ws="none", server_header=False, timeout_graceful_shutdown=_SECONDS,
    )  # fmt: skip
    gc.freeze()  # pages collect garbage, and not among all that was imported
    uvicorn.Server(config).run(sockets=[listener])


def application(pages: Pages, token: str, name: str = "localhost") -> Starlette:
    """Return the server of some pages.

    Without a token it answers requests to this machine's own names alone, and to the one of the
    link, so that no page of a foreign name can read from it. With one, every request needs it.
    """
    guard = Middleware(TrustedHostMiddleware, allowed_hosts=[*_LOOPBACK, name])
    if token:
        guard = Middleware(BaseHTTPMiddleware, dispatch=partial(_guarded, token))
    # a list of 1,000 runs is half a megabyte, and a tunnel may be slow
    compressed = Middleware(GZipMiddleware, compresslevel=1)
    comparison = partial(_page, lambda r: pages.comparison(r.query_params.getlist("run")))
    return Starlette(
        routes=[
            Route("/", partial(_page, lambda _: pages.table())),
            Route("/compare", comparison),
            Route("/run/{key}", partial(_page, lambda r: pages.run(r.path_params["key"]))),
            Route("/run/{key}/report", partial(_report, pages)),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_with_policy), guard, compressed],
        exception_handlers={ConfigError: _refused, OSError: _refused},
    )


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. Raises ConfigError."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise ConfigError(
            f"--host {host}: must be localhost or an IP address, such as 0.0.0.0"
        ) from error


async def _with_policy(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Let every answer forbid what no page needs."""
    answer = await call_next(request)
    headers = {
        "Content-Security-Policy": policy() + _ALONE,
        "Cache-Control": "no-store",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    for name, value in headers.items():
        answer.headers.setdefault(name, value)
    return answer


async def _guarded(token: str, request: Request, call_next: RequestResponseEndpoint) -> Response:
    """Refuse requests without the token, which a link gives once and a cookie afterwards."""
    cookie = f"raypipe-{request.scope['server'][1]}"  # each port has its own
    given = request.query_params.get("token")
    presented = given if given is not None else request.cookies.get(cookie, "")
    if not secrets.compare_digest(presented.encode(), token.encode()):
        text = "The token is missing or wrong: open the link that raypipe ui has printed.\n"
        return PlainTextResponse(text, 403)
    if given is None:
        return await call_next(request)
    others = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
    path = request.scope["path"].lstrip("/")
    answer = RedirectResponse(f"/{path}?{urlencode(others)}", 303)
    answer.set_cookie(cookie, token, httponly=True, samesite="lax")
    return answer


def _refused(request: Request, error: Exception) -> Response:
    del request
    return PlainTextResponse(f"{without_credentials(str(error))}\n", 404)


def _page(make: Callable[[Request], str], request: Request) -> Response:
    """Return a page, or that it has not changed since the reader's last request."""
    content = make(request)
    state = f'"{hashlib.sha256(content.encode()).hexdigest()}"'
    headers = {"ETag": state}
    if request.headers.get("If-None-Match") == state:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type="text/html", headers=headers)


def _report(pages: Pages, request: Request) -> Response:
    """Return a run's stored report, which may run raypipe's own script and asks for nothing."""
    headers = {"Content-Security-Policy": f"{policy()}{_ALONE}; sandbox allow-scripts"}
    return Response(pages.report(request.path_params["key"]), 200, headers, "text/html")
