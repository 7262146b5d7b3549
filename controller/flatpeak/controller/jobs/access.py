"""Where a cluster's job server is and how to be let in, found where Ray looks for it too."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from flatpeak.workers.errors import InputError

_ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:]+\]|[^\s/:@%]+)(:[0-9]{1,5})?(/\S*)?")


def job_address(given: str | None, environment: Mapping[str, str]) -> str | None:
    """The address of a job server, from the option or else from the environment; None for neither.

    Of the environment RAY_API_SERVER_ADDRESS counts, and a RAY_ADDRESS with http: any other one is
    for programs that join the cluster. Raises InputError for what is no such address.
    """
    if given is None:
        there = environment.get("RAY_ADDRESS", "")
        given = environment.get("RAY_API_SERVER_ADDRESS") or (
            there if there.startswith(("http://", "https://")) else None
        )
    if given is None:
        return None
    address = (given if "://" in given else f"http://{given}").rstrip("/")
    found = _ADDRESS.fullmatch(address)
    if not found or int((found[2] or ":0")[1:]) > 65535:
        raise InputError(
            f"{given!r} is no address of a job server; give that of the cluster's dashboard, "
            "like http://HEAD:8265"
        )
    return address


def authorization(environment: Mapping[str, str]) -> dict[str, str]:
    """The header that lets a client in: none if there is no token, or RAY_AUTH_MODE is disabled.

    Raises InputError where RAY_AUTH_MODE asks for a token that is not there.
    """
    mode = environment.get("RAY_AUTH_MODE", "").lower()
    token = None if mode == "disabled" else _token(environment)
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise InputError(
            "the token of the Ray cluster (RAY_AUTH_TOKEN, or the file of RAY_AUTH_TOKEN_PATH, or "
            "~/.ray/auth_token) is not one word of printable ASCII"
        )
    if token is None and mode == "token":
        raise InputError(
            "RAY_AUTH_MODE is token, but there is none; put the cluster's into ~/.ray/auth_token, "
            "or RAY_AUTH_TOKEN, or name its file by RAY_AUTH_TOKEN_PATH"
        )
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def _token(environment: Mapping[str, str]) -> str | None:
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    path = Path(os.path.expanduser(named or "~/.ray/auth_token"))
    try:
        return path.read_text("ascii").strip() or None
    except (OSError, UnicodeDecodeError) as error:
        if named is None and isinstance(error, FileNotFoundError):
            return None
        reason = getattr(error, "strerror", None) or "no ASCII text"
        raise InputError(f"cannot read the token of the Ray cluster in {path}: {reason}") from None
