"""An OpenID Connect provider of a test: it lets in whoever is next in its list, and asks nothing.

The authorization code flow of OpenID Connect Core 1.0 (section 3.1): /authorize sends back with
a code, /token gives an ID token signed with the key of /keys.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

CLIENT = "ampscope-class"


class Provider:
    """``provider.next`` is the address of whoever signs in next."""

    def __init__(self, port: int) -> None:
        from joserfc.jwk import RSAKey

        self.url = f"http://127.0.0.1:{port}"
        self.next = ""
        self._key = RSAKey.generate_key(2048, {"kid": "test", "use": "sig", "alg": "RS256"})
        self._codes: dict[str, tuple[str, str]] = {}
        routes = [
            Route("/.well-known/openid-configuration", self._metadata),
            Route("/authorize", self._authorize),
            Route("/token", self._token, methods=["POST"]),
            Route("/keys", self._keys),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), "127.0.0.1", port, log_level="warning", ws="none"
        )
        self._server = uvicorn.Server(config)

    @contextlib.contextmanager
    def running(self) -> Iterator[Provider]:
        thread = threading.Thread(target=self._server.run)
        thread.start()
        try:
            yield self
        finally:
            self._server.should_exit = True
            thread.join(30)

    async def _metadata(self, _: Request) -> Response:
        return JSONResponse(
            {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "jwks_uri": f"{self.url}/keys",
                "response_types_supported": ["code"],
                "subject_types_supported": ["public"],
                "id_token_signing_alg_values_supported": ["RS256"],
            }
        )

    async def _authorize(self, request: Request) -> Response:
        asked = request.query_params
        code = secrets.token_urlsafe(8)
        self._codes[code] = (self.next, asked.get("nonce", ""))
        back = urlencode({"code": code, "state": asked["state"]})
        return RedirectResponse(f"{asked['redirect_uri']}?{back}", 302)

    async def _token(self, request: Request) -> Response:
        from joserfc import jwt

        email, nonce = self._codes.pop(str((await request.form())["code"]))
        now = int(time.time())
        claims = {
            "iss": self.url, "aud": CLIENT, "sub": email, "iat": now, "exp": now + 600,
            "nonce": nonce, "email": email, "email_verified": True,
        }  # fmt: skip
        token = jwt.encode({"alg": "RS256", "kid": "test"}, claims, self._key)
        return JSONResponse(
            {"access_token": "x", "token_type": "Bearer", "expires_in": 600, "id_token": token}
        )

    async def _keys(self, _: Request) -> Response:
        return JSONResponse({"keys": [self._key.as_dict(private=False)]})
