"""Consent to code that stored configs name. It belongs to the machine and the user that run the code, not to the store.

A config names its user's code: rewards, environments, tools, agents, losses, models. A user who gives a config
on this machine wants its code to run. A config that was read from a store may be anybody's: its code runs only if it
has run here before, or if the user says so. Consent is remembered by digest, so changed code needs it again.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.rlhf.config.user_algorithms import UserAlgorithm
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.custom_code import code_files, code_names
from ratchet.rlhf.models.model_folders import model_folder

if TYPE_CHECKING:
    from ratchet.rlhf.config import ModelConfig, RunConfig

VARIABLE = "RATCHET_TRUST_CODE"
REMOTE_CODE = "trust_remote_code"
_trusting: ContextVar[bool] = ContextVar("trusting", default=False)


@dataclass(frozen=True)
class Code:
    """Code that a config names."""

    key: str
    """Key of the config that names it."""
    name: str
    """Value of the key."""
    files: tuple[Path, ...]
    digest: str
    """sha256 of the files, and of the options that the code is called with."""

    def __str__(self) -> str:
        *others, place = self.files or (Path("no file"),)
        more = f" and {len(others)} more" if others else ""
        text = f"{self.key} {self.name} ({place}{more}, sha256 {self.digest[:16]})"
        return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


@contextmanager
def trusting() -> Iterator[None]:
    """Consents to all code that `require` meets inside."""
    token = _trusting.set(True)
    try:
        yield
    finally:
        _trusting.reset(token)


def give(config: RunConfig) -> None:
    """Remembers that the code of a config may run here: the user of this machine has given the config."""
    _remember(_code_of(config))


def require(stored: RunConfig, config: RunConfig | None = None, *, models_only: bool = False) -> None:
    """Checks that the code of a stored config may run here; on a terminal, asks. Consent is remembered.

    Args:
        stored: a config that was read from a store.
        config: the config to run: `stored` with the user's own changes and their code. None: `stored`.

    Raises:
        UserError: there is no consent; a line for each piece of code.
    """
    running = _code_of(stored if config is None else config)
    if models_only:
        running = [code for code in running if code.key.endswith(REMOTE_CODE)]
    if not (_trusting.get() or os.environ.get(VARIABLE) == "1"):
        named = {(code.key, code.name) for code in _code_of(stored)}
        named |= {(code.key, code.name) for code in running if code.key in _models_with_code(stored)}
        strange = [
            code for code in running if (code.key, code.name) in named and not (_folder() / code.digest).is_file()
        ]
        if refused := [code for code in strange if not _asked(code)]:
            raise UserError(
                "\n".join(
                    f"the run's config names code that has not run on this machine, {code}: read it, then add "
                    f"--trust-code, or set {VARIABLE}=1"
                    for code in refused
                )
            )
    _remember(running)


def _folder() -> Path:
    """Returns the folder in which an empty file for each digest records consent. Never one of the current folder."""
    places = (os.environ.get("XDG_STATE_HOME", ""), os.path.expanduser("~/.local/state"), os.devnull)  # noqa: PTH111
    return next(Path(place) for place in places if os.path.isabs(place)) / "ratchet" / "trusted"  # noqa: PTH117


def _remember(codes: Iterable[Code]) -> None:
    for code in codes:
        with suppress(OSError):  # without a home directory, the user will be asked again
            _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(_folder() / code.digest, os.O_CREAT | os.O_WRONLY, 0o600))


def _asked(code: Code) -> bool:
    """Asks the user of a terminal for consent; returns False without a terminal."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"The run's config names code that has not run on this machine:\n  {code}\nRun it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _code_of(config: RunConfig) -> list[Code]:
    """Returns all code that a config names, except for the built-ins."""
    reward, environment, agent = config.reward, config.rollout.environment, config.rollout.agent
    found = [_by_name("reward.function", name, reward.options.get(name, {})) for name in reward.functions]
    if reward.options.get("code", {}).get("sandbox") == "limits":
        limits = {"options": reward.options["code"], "prompts": config.data.train}
        found.append(Code("reward.options.code.sandbox", "limits", (), _digest(limits, ())))
    if environment is not None and environment.name == "tools":
        found += [_by_name("rollout.tools", str(name), {}) for name in environment.options.get("functions", ())]
        commands = [str(where) for where in environment.options.get("mcp", ())]
        found += [_of_command(command) for command in commands if not command.startswith(("http://", "https://"))]
    elif environment is not None and environment.name == "gymnasium":
        # possibly module:ID; other environments are installed
        played = str(environment.options.get("environment", ""))
        found.append(_by_name("rollout.environment", played, environment.options, is_file=False))
    elif environment is not None:
        found.append(_by_name("rollout.environment", environment.name, environment.options))
    if agent is not None:
        found.append(
            _by_name(
                "rollout.agent",
                _of_package(agent.name, agent.options),
                agent.options,
                is_file=agent.name not in ("verifiers", "openenv"),
            )
        )
    algorithms = {"algorithm.loss": config.algorithm.loss, "algorithm.advantage": config.algorithm.advantage}
    found += [_by_name("run.stages", name, {}) for name in config.run.stages]
    found += [_by_name("run.callbacks", name, {}) for name in config.run.callbacks]
    found += [
        _by_name(key, algorithm.type, algorithm.options)
        for key, algorithm in algorithms.items()
        if isinstance(algorithm, UserAlgorithm)
    ]
    found += [_of_model(key, model) for key, model in _models_with_code(config).items()]
    return [code for code in found if code is not None]


def _models_with_code(config: RunConfig) -> dict[str, ModelConfig]:
    """Returns the models that may bring code, whatever path they have, by the key that allows it."""
    return {f"{key}.{REMOTE_CODE}": model for key, model in config.named_models.items() if model.trust_remote_code}


def _of_package(name: str, options: Mapping[str, object]) -> str:
    """Returns the code that an agent runs: the built-ins for packages import the module of their environment."""
    environment = str(options.get("environment", ""))
    if name == "verifiers":
        return f"{environment.rsplit('/', 1)[-1].split('@', 1)[0].replace('-', '_').lower()}:taskset"
    # openenv has a URL, whose code runs elsewhere
    return name


def _of_command(command: str) -> Code:
    """Returns a command that starts an MCP server, with the files among its words: a script is code, too."""
    try:
        words = shlex.split(command)
    except ValueError:  # it cannot start
        words = []
    files = tuple(Path(word).resolve() for word in words if os.path.isfile(word))  # noqa: PTH113  # False for odd words
    return Code("rollout.mcp", command, files, _digest(command, files))


def _by_name(key: str, name: str, options: Mapping[str, object], *, is_file: bool = True) -> Code | None:
    """Returns the code that `load_named` would run; None if there is none, or if it is a built-in."""
    module, colon, _ = name.rpartition(":")
    # packages that load environments import even a name that ends with .py
    is_file = is_file and (module if colon else name).endswith(".py")
    if not colon and not is_file:
        return None
    files = _files_of(module if colon else name, is_file=is_file)
    called = {"key": key, "name": name, "options": options}  # a reward that may run is not a tool that may be called
    return None if files is None else Code(key, name, files, _digest(called, files))


def _files_of(module: str, *, is_file: bool) -> tuple[Path, ...] | None:
    """Returns the files that run when a module is imported, its own last; None without a module. Imports nothing."""
    if is_file:
        return (Path(module).resolve(),) if Path(module).is_file() else None
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    origins = [spec.origin]
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            break
        # by its last name: a dotted name would import the parents
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
        origins.append(None if spec is None else spec.origin)
    return tuple(Path(origin) for origin in origins if origin is not None and Path(origin).is_file())


def _of_model(key: str, model: ModelConfig) -> Code | None:
    """Returns the code of a model; None if it brings none."""
    try:
        folder = model_folder(model, key.removesuffix(f".{REMOTE_CODE}"))
    except UserError:  # then nothing can be loaded
        return None
    files, names = tuple(code_files(folder)), code_names(folder)
    return Code(key, model.path, files, _digest(names, files)) if files or names else None


def _digest(called: object, files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(json.dumps(called, sort_keys=True, default=str).encode())
    for path in files:
        digest.update(f"\0{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()
