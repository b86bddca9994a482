"""Looks for a login of Weights & Biases where its client does, without asking its server."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

SERVER = "https://api.forge.coreweave.com"
"""The default of wandb 0.31."""
FORMER = "api.wandb.ai"
"""The server of older versions, whose logins also work for today's."""
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def has_login() -> bool:
    """True if an API key is found in the environment, a settings file or a netrc file, or the mode is not online."""
    settings = _settings()
    mode = os.environ.get("WANDB_MODE") or settings.get("mode") or "online"
    if mode != "online" or any(os.environ.get(name) for name in KEYS) or "api_key" in settings:
        return True
    server = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or SERVER
    machine = urlsplit(server).netloc
    own = urlsplit(SERVER).netloc
    return any(map(_has_key, (own, FORMER) if machine in (own, own.removeprefix("api.")) else (machine,)))


def _settings() -> dict[str, str]:
    """Reads the settings that `wandb login --host` and `wandb offline` write; the folder's override the user's."""
    parser = configparser.ConfigParser(default_section="default", interpolation=None)
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    try:
        parser.read([user / "settings", Path(os.environ.get("WANDB_DIR") or ".") / "wandb" / "settings"])
    except configparser.Error:  # wandb ignores it, too
        return {}
    return dict(parser.defaults())


def _has_key(machine: str) -> bool:
    """True if the netrc file that wandb reads, the first that exists, has a password for a server's host and port."""
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    paths = [Path(file).expanduser() for file in files]
    try:
        found = netrc.netrc(next(filter(Path.exists, paths), paths[0])).authenticators(machine)
    except (OSError, netrc.NetrcParseError):
        return False
    return found is not None and bool(found[2])
