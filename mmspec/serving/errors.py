"""API errors, in the format of the API of a path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from mmspec.errors import UserError

MESSAGES = "/v1/messages"

_KINDS = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"},
    **{429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"},
}
"""Error types of Anthropic's API by status."""


class APIError(Exception):
    """An error response.

    Args:
        message: one line: rule, expected, received.
        param: path of the field in the request, such as ``messages[0].content``.
        code: OpenAI's error code; None for errors without a code.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def content(self, path: str = "") -> dict[str, Any]:
        """The JSON object of the response, in the format of the API of a path: Anthropic's, Ollama's or OpenAI's."""
        if path.startswith("/api/"):
            return {"error": self.message}
        if path.startswith(MESSAGES):
            kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, path: str = "") -> JSONResponse:
        return JSONResponse(self.content(path), self.status, self.headers)

    def event(self, path: str = "") -> bytes:
        """The end of a stream that has failed."""
        content = json.dumps(self.content(path)).encode()
        if path.startswith("/api/"):
            return content + b"\n"
        named = path.startswith(MESSAGES)
        return b"".join((b"event: error\n" * named, b"data: ", content, b"\n\n", b"data: [DONE]\n\n" * (not named)))


def as_api_error(error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail), headers=error.headers)
    return APIError(500, f"internal error ({type(error).__name__}): details are in the server's log")
