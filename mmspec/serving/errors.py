"""API errors in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from mmspec.errors import UserError


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

    def content(self) -> dict[str, Any]:
        """The JSON object of the response."""
        if self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.content(), self.status, self.headers)


def as_api_error(error: Exception) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, UserError):
        return APIError(400, str(error))
    if isinstance(error, HTTPException):
        return APIError(error.status_code, str(error.detail), headers=error.headers)
    return APIError(500, f"internal error ({type(error).__name__}): details are in the server's log")
