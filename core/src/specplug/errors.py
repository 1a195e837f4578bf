"""The errors a user can cause: one clear line each, never a traceback (the CLI exits with 2)."""

from typing import Literal

Blame = Literal["request", "engine"]
"""Whose fault it is that an answer ended with an error: what the request itself asked for, or what ran it."""


class UserError(Exception):
    """Something the user gave cannot be honoured.

    The message is one line that names the option, its value, what is allowed and the way out.
    """


class RefusedError(UserError):
    """A configuration was planned and refused: the reason and the nearest thing that works.

    `trace` holds the lines that led here (resolution, defaults, checks), for `specplug doctor`.
    """

    def __init__(self, message: str, trace: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.trace = trace


class DrafterFailedError(RuntimeError):
    """An exception left `ingest` or `propose`; names distribution, version and method."""
