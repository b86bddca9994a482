"""Whether Weights & Biases is logged in, found where its client looks, without asking its server."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

SERVER = "https://api.wandb.ai"
KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def has_login() -> bool:
    """Whether there is an API key, in the environment, a settings file or a netrc file, or none is needed, because the
    mode is not online."""
    settings = _settings()
    mode = os.environ.get("WANDB_MODE") or settings.get("mode") or "online"
    if mode != "online" or any(os.environ.get(name) for name in KEYS) or "api_key" in settings:
        return True
    server = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or SERVER
    return (urlsplit(server).hostname or server) in _netrc_hosts()


def _settings() -> dict[str, str]:
    """The settings that `wandb login --host` and `wandb offline` write: those of the folder come before the user's."""
    parser = configparser.ConfigParser(default_section="default", interpolation=None)
    user = Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb")
    try:
        parser.read([user / "settings", Path(os.environ.get("WANDB_DIR") or ".") / "wandb" / "settings"])
    except configparser.Error:  # which wandb ignores, too
        return {}
    return dict(parser.defaults())


def _netrc_hosts() -> set[str]:
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    hosts = set[str]()
    for file in files:
        try:
            hosts |= netrc.netrc(Path(file).expanduser()).hosts.keys()
        except (OSError, netrc.NetrcParseError):
            continue
    return hosts
