"""Serves a snapshot over an OpenAI-compatible endpoint, and stores its answers in the run's folder."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from ratchet.infra.progress import note
from ratchet.infra.runs.run import Run
from ratchet.infra.runs.served import ServedLog
from ratchet.infra.workers.call_log import CallLog
from ratchet.infra.workers.resources import Resources
from ratchet.infra.workers.role_engines import Engines
from ratchet.rlhf.agents.agent_loop import Generator, Rules
from ratchet.rlhf.agents.gateway import Gateway
from ratchet.rlhf.agents.serving import Served
from ratchet.rlhf.config import RunConfig
from ratchet.rlhf.environments.dialogues import Dialogue
from ratchet.rlhf.errors import EngineLost
from ratchet.rlhf.rollout.engine import Request, Sampling

WAIT_S = 1.0
"""Longest time in seconds until the loss of the engine is noticed."""


def serve(
    run: Run,
    config: RunConfig,
    version: int,
    *,
    host: str,
    port: int,
    key: str,
    listening: Callable[[str], None],
) -> None:
    """Answers calls until it is interrupted. A lost engine is restarted, and calls continue.

    Args:
        run: The run, whose folder gets the answers.
        config: The run's config, whose `model.path` is the folder of the snapshot.
        version: Number of iterations of the snapshot.
        port: Port to listen on; 0: any free one.
        key: The key of all clients.
        listening: Called with the base URL of the endpoint once it listens.

    Raises:
        UserError: The endpoint cannot listen on the address.
    """
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    engines, tokenizer = Engines(config, ["rollout"]), Resources(config).tokenizer
    rollout, context = config.rollout, config.data.max_prompt_tokens + config.rollout.max_response_tokens
    sampling = replace(Sampling.of(rollout, temperature=rollout.temperature, seed=config.run.seed), max_tokens=context)
    clients = Served(name, Gateway(host, port), key, context=context, listening=listening)
    rules = Rules(sampling, agents=clients, recorder=CallLog(ServedLog(run.store, name).write))
    # one trajectory that never ends: its agent is the endpoint, which answers all clients
    serving = Dialogue(Request(name, ()))
    generator = Generator(engines.rollout(), tokenizer, interruptible=True)
    generator.resume(version)
    try:
        generator.submit([(serving, rules)])
        while True:
            try:
                generator.wait(WAIT_S)
            except EngineLost as lost:
                note(f"{lost}: it is started again, and calls continue")
                engines.end_rollout()
                generator.resume(version, engines.rollout())
    finally:
        generator.cancel([serving])
        engines.end_rollout()
