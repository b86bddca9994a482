"""Commands that use the models of snapshots: they evaluate, serve, export and push them."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet.flows.commands.console import console
from ratchet.flows.commands.options import (
    DEFAULT_STORE,
    Adapter,
    Best,
    Iteration,
    Name,
    Overrides,
    RoleOption,
    Store,
    TrustCode,
    make_folder,
    run_names,
    url_of,
)
from ratchet.flows.commands.starting import has_server, silence_prefect, start_server, wait_for
from ratchet.rlhf import consent
from ratchet.rlhf.config import RunConfig, parse_config
from ratchet.rlhf.errors import UserError, counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ratchet.infra.runs.run import Run


class ServerApi(StrEnum):
    vllm = "vllm"
    sglang = "sglang"
    tgi = "tgi"


def evaluate(
    name: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="a run, or a Hugging Face model folder", autocompletion=run_names)
    ],
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(help="prompt file; by default the run's validation.data")] = None,
    store: Store = DEFAULT_STORE,
    iteration: Iteration = None,
    n: Annotated[
        int | None, typer.Option(help="trajectories per prompt; by default the run's validation.n, or 1", min=1)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="sampling temperature, 0: greedy; by default the run's validation.temperature, or 1", min=0),
    ] = None,
    max_response_tokens: Annotated[int | None, typer.Option(help="maximum length of a response", min=1)] = None,
    reward: Annotated[
        str | None, typer.Option(help="a built-in reward, package.module:function or file.py:function")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="URL of a server that has the model; it generates the answers")
    ] = None,
    api: Annotated[ServerApi, typer.Option(help="type of the server")] = ServerApi.vllm,
    output: Annotated[Path | None, typer.Option(help="write the trajectories to this Parquet file")] = None,
    trust_code: TrustCode = False,
) -> None:
    """Answer and score held-out prompts, and print the solve rate of each data source with a confidence interval.

    With the run's own prompts and settings, the answers are those of its validation at that iteration, if the same
    engine generates: a run on servers is evaluated with hf, whose answers may differ.
    """
    import tempfile

    from ratchet.flows.commands import tables

    if output is not None:
        make_folder(output.parent)
    with tempfile.TemporaryDirectory() as folder:
        changes: dict[str, object] = {"validation.n": n} if n is not None else {}
        changes |= {"validation.temperature": temperature} if temperature is not None else {}
        changes |= {"validation.data": data} if data else {}
        changes |= {"rollout.max_response_tokens": max_response_tokens} if max_response_tokens else {}
        if reward:
            changes |= {"reward.function": reward, "reward.model": None, "reward.judge": None, "reward.options": {}}
        if server:
            changes |= {"rollout.engine": {"type": "server", "urls": [server], "api": api.value}}
        config, version = evaluation_config(name, store, iteration, Path(folder), changes, overrides or [])
        prefect = start_server()
        from ratchet.flows.evaluate import evaluate as flow
        from ratchet.flows.terminal import progress
        from ratchet.tasks.recording import recorded

        wait_for(prefect)
        with progress(console):
            answers = recorded(lambda: flow(config, version), lambda: flow.fn(config, version))
    if output is not None:
        tables.write(answers, output)
    console.print(tables.solve_rates(answers, name, config.reward.on_error, config.solved_score))


def evaluation_config(
    name: str,
    store: str,
    iteration: int | None,
    folder: Path,
    changes: Mapping[str, object],
    overrides: Sequence[str],
) -> tuple[RunConfig, int]:
    """Returns the config that evaluates a model folder, or a snapshot of a run, which it exports to `folder`; and the
    number of iterations of the snapshot, 0 for a model folder."""
    if (Path(name) / "config.json").is_file():
        if iteration is not None:
            raise UserError("--iteration chooses a snapshot of a run, and a model folder has none: leave it out")
        tree = {
            "run": {"name": "evaluate"},
            "model": {"path": name, "dtype": "float32"},
            "data": {"train": ["none"]},
            "rollout": {"max_response_tokens": 512, "prompts_per_shard": 128},
        }
        return parse_config(tree, "evaluate").with_values(changes, overrides), 0
    from ratchet.infra.execution.claims import run_url
    from ratchet.infra.runs.run import open_run

    run = open_run(name if "://" in name else run_url(store, name))
    version = run.newest_snapshot() if iteration is None else iteration
    return exported_config(run, version, folder, changes, overrides), version


def exported_config(
    run: Run, version: int, folder: Path, changes: Mapping[str, object], overrides: Sequence[str]
) -> RunConfig:
    """Exports a snapshot to `folder`, and returns the run's config with that model and with changes."""
    # reset keys that only training uses
    needed: dict[str, object] = {"model.path": str(folder), "model.lora": None, "algorithm.kl": {}}
    if run.config.rollout.engine.outlives_runs:  # the server may not have the weights of this snapshot
        needed["rollout.engine"] = "hf"
    config = run.config.with_values({**needed, **changes}, overrides)
    consent.require(run.config, config.with_values({"model.path": run.config.model.path}))
    run.export(version, folder)
    return config


def serve(
    name: Name,
    overrides: Overrides = None,
    store: Store = DEFAULT_STORE,
    iteration: Iteration = None,
    best: Best = False,
    host: Annotated[
        str, typer.Option(help="address to listen on; any other address than loopback lets the network call the model")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0: any free one", min=0, max=65535)] = 8000,
    trust_code: TrustCode = False,
) -> None:
    """Serve the policy of a snapshot over an OpenAI-compatible endpoint, and store its answers, until Ctrl-C.

    Clients send the key in the variable RATCHET_API_KEY; if it is not set, a new key is printed. `ratchet ingest RUN`
    turns the stored answers into prompts and trajectories.
    """
    silence_prefect()
    import secrets
    import tempfile
    from contextlib import suppress

    from ratchet.flows.terminal import progress
    from ratchet.infra.execution.stopping import on_signals
    from ratchet.infra.runs.run import open_run

    run = open_run(url_of(name, store))
    given = os.environ.get("RATCHET_API_KEY")
    key = given or f"sk-{secrets.token_urlsafe(24)}"

    def listening(base_url: str) -> None:
        shown = "$RATCHET_API_KEY" if given else key
        console.print(f"{name} answers at {base_url} (model: policy, key: {shown}); Ctrl-C ends it", highlight=False)

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), on_signals(end), tempfile.TemporaryDirectory() as folder, progress(console):
        version = _snapshot(run, iteration, best)
        run.exportable(version)
        config = exported_config(run, version, Path(folder), {}, overrides or [])
        from ratchet.flows.serve import serve as answer_calls

        answer_calls(run, config, version, host=host, port=port, key=key, listening=listening)
    console.print(f"the answers are stored; `ratchet ingest {name} -o DIR` turns them into data", highlight=False)


def ingest(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|FILE...",
            help="runs that were served, and files or folders of chats (Parquet, Arrow, JSON, CSV) and of agents' "
            "trajectories (ATIF)",
            autocompletion=run_names,
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="folder for prompts.parquet and trajectories.parquet")],
    ratings: Annotated[str | None, typer.Option(help="file of ratings: the id of a completion, and score")] = None,
    min_score: Annotated[
        float | None, typer.Option(help="keep only answers rated at least this in the trajectories")
    ] = None,
    store: Store = DEFAULT_STORE,
) -> None:
    """Turn answers of `ratchet serve`, files of chats, and agents' trajectories into prompts and trajectories."""
    from ratchet.infra.runs.ingest import ingest as read_logs
    from ratchet.infra.runs.parquet_file import write_parquet
    from ratchet.infra.runs.run import open_run
    from ratchet.rlhf.config.sections import ENDINGS

    def opened(source: str) -> Run | str:
        if source.endswith(ENDINGS) or Path(source).is_file():
            return source
        try:
            return open_run(url_of(source, store))
        except UserError:
            if Path(source).is_dir():
                return source
            raise

    ingested = read_logs([opened(source) for source in sources], ratings, min_score)
    make_folder(output)
    for name, table in (("prompts", ingested.prompts), ("trajectories", ingested.trajectories)):
        write_parquet(table, str(output / f"{name}.parquet"))
        console.print(f"{len(table)} {name} in {output / name}.parquet", highlight=False)
    for reason, count in ingested.left_out.items():
        console.print(f"{counted(count, 'answer')} left out: {reason}", highlight=False)
    if ingested.unknown:
        console.print(f"{counted(ingested.unknown, 'rating')} without an answer in these logs", highlight=False)


def export(
    name: Name,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder to write")],
    store: Store = DEFAULT_STORE,
    iteration: Iteration = None,
    role: RoleOption = "actor",
    best: Best = False,
    adapter: Adapter = False,
    trajectories: Annotated[
        bool,
        typer.Option(
            "--trajectories",
            help="write the trajectories instead, each as a file of ATIF (Harbor's JSON format); with --iteration K "
            "only those of iteration K",
        ),
    ] = False,
    trust_code: TrustCode = False,
) -> None:
    """Write the model of a snapshot as a Hugging Face folder, with its tokenizer and a model card."""
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs.run import open_run

    if trajectories and (best or adapter or role != "actor"):
        raise UserError("--trajectories writes no model: leave out --best, --adapter and --role")
    run = open_run(url_of(name, store))
    if trajectories:
        from ratchet.infra.runs.atif import export_trajectories

        make_folder(folder)
        with progress(console):
            count = export_trajectories(run, folder, iteration)
        console.print(f"{count} trajectories are in {folder}", highlight=False)
        return
    with progress(console):
        version = _snapshot(run, iteration, best)
    run.exportable(version, role, adapter=adapter)
    make_folder(folder)
    with progress(console):
        run.export(version, folder, role, adapter=adapter)
        _record(f"file://{folder.resolve()}", run, version)
    console.print(f"the {role} after {counted(version, 'iteration')} is in {folder}")


def push(
    name: Name,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="the repository on the hub: owner/name")],
    store: Store = DEFAULT_STORE,
    iteration: Iteration = None,
    role: RoleOption = "actor",
    best: Best = False,
    adapter: Adapter = False,
    public: Annotated[
        bool, typer.Option("--public", help="make a new repository public, or push to one that is")
    ] = False,
    trajectories: Annotated[
        bool, typer.Option("--trajectories", help="upload the trajectories, as a dataset, instead of the model")
    ] = False,
    without: Annotated[
        str | None, typer.Option(help="with --trajectories: columns to leave out, such as prompt,messages")
    ] = None,
    trust_code: TrustCode = False,
) -> None:
    """Upload the model of a snapshot to the Hugging Face hub, as `export` writes it. New repositories are private.

    With --trajectories, upload the trajectories of all closed iterations as a dataset. The token is that of `hf auth
    login`, or of the variable HF_TOKEN.
    """
    from ratchet.flows.terminal import progress
    from ratchet.infra.runs import hub
    from ratchet.infra.runs.run import open_run

    if trajectories and (iteration is not None or best or adapter or role != "actor"):
        raise UserError("--trajectories uploads no model: leave out --iteration, --best, --adapter and --role")
    if without is not None and not trajectories:
        raise UserError("--without leaves out columns of trajectories: add --trajectories")
    run = open_run(url_of(name, store))
    with progress(console):
        if trajectories:
            columns = [] if without is None else [column.strip() for column in without.split(",")]
            pushed = hub.push_trajectories(run, repo, without=columns, public=public)
            what = f"the trajectories of {counted(run.state.iteration, 'iteration')} are"
        else:
            version = _snapshot(run, iteration, best)
            pushed = hub.push(run, repo, version, role, adapter=adapter, public=public)
            _record(f"hf://{repo}", run, version)
            what = f"the {role} after {counted(version, 'iteration')} is"
    console.print(f"{what} at {pushed.url} ({'private' if pushed.private else 'public'})", highlight=False)


def _record(url: str, run: Run, version: int) -> None:
    """Records a written model as an asset."""
    if has_server():
        from ratchet.flows.prefect_events import record_model

        record_model(url, run, version)


def _snapshot(run: Run, iteration: int | None, best: bool) -> int:
    if best and iteration is not None:
        raise UserError("--best and --iteration both choose the snapshot: give only one")
    return run.best_snapshot() if best else run.newest_snapshot() if iteration is None else iteration
