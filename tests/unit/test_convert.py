"""`ratchet convert`: what other programs' settings become, which comments there are, and how scripts are read."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from benchmarks.peers import problems, table
from ratchet.rlhf.algorithms import Distillation
from ratchet.rlhf.config import RunConfig, keys, load_config, parse_config
from ratchet.rlhf.config.counterparts import SOURCES, Settings, Source
from ratchet.rlhf.config.engines import FSDPConfig
from ratchet.rlhf.convert import Conversion, convert
from ratchet.rlhf.convert.shell import launches, read_script
from ratchet.rlhf.errors import UserError

SCRIPTS = Path(__file__).parents[1] / "data" / "scripts"
STEPS = "trainer.total_training_steps=100"
"""What verl_dapo.sh needs where its data cannot be read."""
NEEDED = {
    "verl_dapo": [STEPS],
    "openrlhf_ppo": ["--reward.normalize_enable", "false"],
    "trl_ppo": ["--missing_eos_penalty", "null"],
}
"""What scripts need besides; the settings of two have no counterpart."""
VERL = next(source for source in SOURCES if source.name == "verl")
QUICKSTART = [
    "data.train_files=$HOME/data/gsm8k/train.parquet",
    "data.val_files=$HOME/data/gsm8k/test.parquet",
    "data.train_batch_size=256",
    "data.max_prompt_length=512",
    "data.max_response_length=512",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "critic.optim.lr=1e-5",
    "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "trainer.logger=console",
    "trainer.val_before_train=False",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.save_freq=10",
    "trainer.test_freq=10",
    "trainer.total_epochs=15",
]
"""The settings of verl's quickstart (docs/start/quickstart.rst, Apache-2.0)."""


def commands(text: str, **environment: str) -> list[list[str]]:
    return [list(words) for words in read_script(text, "run.sh", environment).commands]


def script(folder: Path, *settings: str, start: str = "python3 -m verl.trainer.main_ppo") -> Path:
    path = folder / "run.sh"
    path.write_text(" \\\n    ".join([start, *settings]) + "\n")
    return path


def comments(converted: Conversion) -> str:
    return " ".join(line.partition("#")[2].strip() for line in converted.text().splitlines())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a.b=c  # why", ["run", "a.b=c"]),
        ('run a.b=\'["x","y"]\' \\\n  c="d e"', ["run", 'a.b=["x","y"]', "c=d e"]),
        ("run a=['x','y']", ["run", "a=[x,y]"]),
        ("n=3; run a=$n b=${n} c=$((n * (n + 1) - 8 / 2)) '$n'", ["run", "a=3", "b=3", "c=8", "$n"]),
        ("run ${A:-x} ${SET:-y} ${SET:+z} ${A-w} ${A:=v}$A", ["run", "x", "given", "z", "w", "vv"]),
        ('A=(a.b=1\n  # no\n \'c d\'); A+=(e); run "${A[@]}" ${A[1]} "$@"', ["run", "a.b=1", "c d", "e", "c", "d"]),
        ("x='a b'; run $x \"$x\" y=$x", ["run", "a", "b", "a b", "y=a b"]),
        ("export A=1 B=$SET; run $A$B", ["run", "1given"]),
        ("case $SET in x|giv*) v=1 ;; *) v=2 ;; esac; run $v", ["run", "1"]),
        ('if [ "${A:-1}" != 0 ] && [ -n "$SET" ]; then v=1; else v=2; fi; run $v', ["run", "1"]),
        ("if [[ $SET == x* ]]; then v=1; elif [ 3 -gt 2 ]; then v=2; fi; run $v", ["run", "2"]),
        ("v=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu); run $v", ["run", "gpu"]),
        ("run a 2>&1 | tee log.txt", ["run", "a"]),
        ("n=2; run ${A:-$((n + 1))} ${SET:-$((n))}", ["run", "3", "given"]),
        ('A="\n  a=1 \\\n  b=$SET"; B="c=3"; A="$A $B"; run $A', ["run", "a=1", "b=given", "c=3"]),
        ('n=3; srun bash -c "run a=$n \\\n b=\\"c\\"" &', ["run", "a=3", "b=c"]),
        ("n=3; read -r -d '' given <<EOF\na=$n \\\n  b=2\nEOF\nrun $given", ["run", "a=3", "b=2"]),
        ('if [ "$#" -lt 2 ]; then exit 1; fi; run "$#"', ["run", "100"]),
    ],
)
def test_a_script_is_evaluated_like_bash_does(text: str, words: list[str]) -> None:
    """But for `y=$x`, where Bash splits the value: nobody means that."""
    assert words in commands(text, SET="given")


def test_no_command_of_a_script_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    read = read_script(f"x=$(touch {marker})\ntouch {marker}\n>{marker} run $x", "run.sh", {})
    assert ("touch", str(marker)) in read.commands
    assert read.assumptions == (f"line 1: $(touch {marker}) is not run: '' is taken as its output",)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x=1\nrun ${x%.*}", "run.sh, line 2: ${x%.*} is not understood: write the value out"),
        ("run $((2 ** 3))", "run.sh, line 1: $((2 ** 3)) is not understood: write the number out"),
        ("x=a\nrun $((x + 1))", "run.sh, line 2: $((x + 1)) needs a number, not 'a'"),
        ("case $x in", "run.sh, line 1: "),
    ],
)
def test_what_is_not_understood_in_a_script_is_named(text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        read_script(text, "run.sh", {})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_loops_are_left_out_and_unset_variables_are_empty_and_the_config_says_so() -> None:
    read = read_script("for i in 1 2; do run $i; done\nrun a=$nothing", "run.sh", {})
    assert read.commands == (("run", "a="),)
    assert read.assumptions == (
        "line 1: the loop is left out",
        "line 2: nothing is not set: it is taken as empty",
    )


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["python3", "-m", "verl.trainer.main_ppo", "a=1"], ("verl.trainer.main_ppo", ("a=1",))),
        (["uv", "run", "--extra", "vllm", "python3", "-m", "a.b", "c=1"], ("a.b", ("c=1",))),
        (["ray", "job", "submit", "--", "python3", "-m", "recipe.dapo.main_dapo"], ("recipe.dapo.main_dapo", ())),
        (["trl", "grpo", "--beta", "0"], ("trl grpo", ("--beta", "0"))),
        (
            ["accelerate", "launch", "--num_processes", "2", "ppo.py", "--x"],
            ("ppo.py", ("--num_processes", "2", "--x")),
        ),
    ],
)
def test_the_command_that_starts_a_program_is_found(words: list[str], started: tuple[str, tuple[str, ...]]) -> None:
    assert list(launches([tuple(words)])) == [started]
    assert list(launches([("mkdir", "-m", "700", "x"), ("set", "-x")])) == []


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.stem)
def test_every_setting_of_an_example_is_converted_or_explained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    program = path.stem.partition("_")[0]
    converted = convert(path, program, NEEDED.get(path.stem, []))
    text = converted.text()
    assert parse_config(yaml.safe_load(text), path.name) == converted.config()
    (_, arguments), *_ = launches(read_script(path.read_text(), path.name, {"HOME": "/home/me"}).commands)
    if program == "verl":
        given = [argument.partition("=")[0].lstrip("+") for argument in arguments]
    else:
        given = [argument[2:] for argument in arguments if argument.startswith("--")]
    assert len(given) > 10
    for key in given:
        assert re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", comments(converted)), key
    assert "no counterpart is known" not in text
    assert max(map(len, text.splitlines())) < 200


def test_all_of_verls_quickstart_is_in_the_table_by_todays_names(tmp_path: Path) -> None:
    given = [setting.partition("=")[0] for setting in QUICKSTART]
    assert len(given) == 25
    assert [key for key in given if VERL.counterpart(key) is None or VERL.today(key) != key] == []
    config = convert(script(tmp_path, *QUICKSTART), "verl").config()
    assert (config.data.prompts_per_iteration, config.actor.mini_batch_trajectories) == (256, 64)
    assert (config.critic and config.critic.lr, config.pools, config.rollout.engine.type) == (1e-5, {}, "vllm")
    assert config.actor.micro_batch_tokens == 4 * (512 + 512)
    assert config.algorithm.kl.in_reward is None, "verl ignores kl_coef without use_kl_in_reward"
    assert (config.algorithm.advantage.lam, config.rollout.n) == (1.0, 1), "verl's defaults"  # type: ignore[union-attr]


def test_verls_units_and_combinations(tmp_path: Path) -> None:
    config = convert(SCRIPTS / "verl_dapo.sh", "verl", [STEPS]).config()
    assert config.actor.mini_batch_trajectories == 32 * 16
    assert config.algorithm.dynamic_sampling is not None
    assert config.algorithm.dynamic_sampling.max_prompts == 10 * 3 * 512
    assert config.algorithm.overlong_penalty is not None
    assert config.algorithm.overlong_penalty.buffer_tokens == 4096
    assert config.algorithm.loss.model_dump() == {
        "type": "ppo",
        "aggregate": "token-mean",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.28,
        "clip_ratio_c": 10.0,
    }
    assert config.pools["all"].workers == 128
    assert config.actor.engine == FSDPConfig(sequence_parallel=8, offload=True)
    assert config.actor.lr_schedule.warmup_iterations == 10
    assert config.validation.model_dump(include={"n", "temperature", "every"}) == {
        "n": 1,
        "temperature": 1.0,
        "every": 5,
    }
    newer = convert(SCRIPTS / "verl_dapo_7b_math.sh", "verl").config()
    assert newer.algorithm.overlong_penalty == config.algorithm.overlong_penalty, "the older key says the same"
    assert (newer.train.iterations, newer.algorithm.dynamic_sampling) == (100, None)
    changes = [
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=mse",
        "++actor_rollout_ref.actor.kl_loss_coef=0.5",
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "reward.custom_reward_function.path=my.py",
    ]
    config = convert(script(tmp_path, *QUICKSTART), "verl", changes).config()
    assert config.algorithm.kl.model_dump() == {
        "in_reward": 0.001,
        "in_loss": 0.5,
        "reward_estimator": "k1",
        "loss_estimator": "k2",
        "controller": {"type": "adaptive", "target": 0.1, "horizon": 10000},
    }
    correction = config.algorithm.rollout_correction
    assert correction is not None
    assert correction.weights is not None
    assert (correction.weights.level, correction.weights.lower, correction.weights.upper) == ("sequence", 0.5, 5.0)
    assert config.reward.function == "my.py:compute_score"


@pytest.mark.parametrize(("loss_type", "loss", "has_weights"), [("reinforce", "gpg", True), ("ppo_clip", "ppo", False)])
def test_a_bypass_has_the_loss_that_verl_computes(tmp_path: Path, loss_type: str, loss: str, has_weights: bool) -> None:
    """With ppo_clip, verl reads no weights: the ratio is that to the rollout already."""
    prefix = "algorithm.rollout_correction"
    changes = [
        f"{prefix}.bypass_mode=True",
        f"{prefix}.loss_type={loss_type}",
        f"{prefix}.rollout_is=token",
        "data.shuffle=False",
    ]
    config = convert(script(tmp_path, *QUICKSTART), "verl", changes).config()
    correction = config.algorithm.rollout_correction
    assert correction is not None
    assert (config.bypass, config.algorithm.loss.type) == (True, loss)
    assert (correction.weights is not None) == has_weights
    assert not config.data.shuffle


def test_a_config_of_verl_may_be_yaml_with_references(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text(
        """
        data: {train_files: [~/p.parquet], train_batch_size: 64, max_response_length: 128}
        actor_rollout_ref:
          model: {path: m}
          rollout: {name: hf, n: 4, response_length: "${oc.select:data.max_response_length,512}"}
          actor:
            ppo_mini_batch_size: "${data.train_batch_size}"
            rollout_n: "${oc.select:actor_rollout_ref.rollout.n,1}"
            _target_: verl.workers.config.FSDPActorConfig
        algorithm: {adv_estimator: grpo}
        trainer:
          n_gpus_per_node: 1
          experiment_name: ???
        """
    )
    converted = convert(path, "verl")
    config = converted.config()
    assert (config.data.prompts_per_iteration, config.actor.mini_batch_trajectories) == (64, 256)
    assert (config.rollout.engine.type, config.run.name) == ("hf", "run")
    assert config.data.train == (f"{Path.home()}/p.parquet",)
    assert "_target_" not in converted.text()


def test_trl_counts_completions_of_all_processes_and_accumulated_steps(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    given = {
        "model_name_or_path": "m",
        "dataset_name": "trl-lib/tldr",
        "num_generations": 8,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 8,
        "num_iterations": 2,
        "max_steps": 400,
        "beta": 0.04,
        "epsilon_high": 0.28,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 40,
        "report_to": ["wandb", "trackio"],
        "reward_funcs": "think_format_reward",
    }
    path.write_text(yaml.safe_dump(given))
    config = convert(path, "trl", ["--num_processes", "2"]).config()
    assert config.data.prompts_per_iteration == 2 * 4 * 8 // 8
    assert config.actor.mini_batch_trajectories == 2 * 4 * 4
    assert config.train.iterations == 400 // (2 * 2), "two optimizer steps in each of two passes"
    assert config.actor.lr_schedule.model_dump() == {
        "type": "cosine",
        "warmup_iterations": 10,
        "decay_iterations": 90,
        "min_ratio": 0.0,
    }
    assert (config.algorithm.kl.in_loss, config.algorithm.kl.loss_estimator) == (0.04, "k3")
    assert (config.algorithm.advantage.type, config.algorithm.loss.type) == ("dr_grpo", "ppo")
    assert config.algorithm.loss.aggregate == "seq-mean-token-sum-norm"  # type: ignore[union-attr]
    assert (config.reward.function, config.tracking, config.pools["all"].workers) == ("format", ("wandb", "trackio"), 2)
    alone = convert(path, "trl")
    assert alone.config().actor.mini_batch_trajectories == 4 * 4
    assert "one process is assumed: num_processes is not given" in comments(alone)
    moving = ["--num_processes", "2", "--sync_ref_model", "true", "--ref_model_sync_steps", "16"]
    assert convert(path, "trl", moving).config().reference.model_dump() == {"model": None, "sync_every": 4, "mix": 0.6}
    config = convert(path, "trl", ["--importance_sampling_level=sequence", "--loss_type", "grpo"]).config()
    assert config.algorithm.loss.type == "gspo"


def test_trls_ppo_is_told_from_its_grpo() -> None:
    converted = convert(SCRIPTS / "trl_ppo.sh", "trl", NEEDED["trl_ppo"])
    config = converted.config()
    assert converted.program == "TRL (PPO)"
    assert (config.data.prompts_per_iteration, config.rollout.n, config.rollout.temperature) == (32, 1, 0.7)
    assert (config.algorithm.kl.in_reward, config.reward.function) == (0.05, None)
    assert config.train.iterations == 313, "10,000 episodes, rounded up"
    assert config.critic is not None
    assert (config.critic.lr, config.critic.cliprange_value) == (3e-6, 0.2)


def test_openrlhfs_older_flags_mean_the_same() -> None:
    config = convert(SCRIPTS / "openrlhf_dapo.sh", "openrlhf").config()
    assert convert(SCRIPTS / "openrlhf_dapo_older_flags.sh", "openrlhf").config() == config
    assert (config.data.prompts_per_iteration, config.rollout.n) == (128, 8)
    assert config.actor.mini_batch_trajectories == 128
    assert (config.algorithm.kl.in_loss, config.algorithm.kl.in_reward) == (1e-3, None)
    assert config.train.iterations == 20_000 // 128
    ema = convert(SCRIPTS / "openrlhf_dapo.sh", "openrlhf", ["--train.enable_ema"]).config().actor.ema_decay
    assert ema == pytest.approx(0.992**8), "an iteration has 128 x 8 / 128 steps"
    ppo = convert(SCRIPTS / "openrlhf_ppo.sh", "openrlhf", NEEDED["openrlhf_ppo"]).config()
    assert (ppo.algorithm.kl.in_reward, ppo.algorithm.kl.in_loss) == (0.01, None)
    assert ppo.critic is not None
    assert ppo.critic.model is not None
    assert ppo.critic.model.path == "OpenRLHF/Llama-3-8b-rm-700k"
    assert ppo.validation.data is None
    given = [*NEEDED["openrlhf_ppo"], "--eval.dataset", "test.parquet"]
    held_out = convert(SCRIPTS / "openrlhf_ppo.sh", "openrlhf", given).config().validation
    assert (held_out.data, held_out.n, held_out.temperature, held_out.every) == ("test.parquet", 4, 0.6, 0)


def test_epochs_become_iterations_if_the_data_can_be_read(tmp_path: Path) -> None:
    data = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["p"] * 1000}), data)
    path = script(tmp_path, *QUICKSTART)
    converted = convert(path, "verl", [f"data.train_files=['{data}', '{data}']"])
    assert converted.config().train.iterations == 2000 // 256 * 15
    assert "15 (trainer.total_epochs) x 2000 rows / 256 prompts" in comments(converted)


def test_epochs_stay_epochs_if_the_data_cannot_be_read(tmp_path: Path) -> None:
    cosine = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    unread = convert(script(tmp_path, *QUICKSTART), "verl", ["data.train_files=nowhere.parquet", cosine])
    train = unread.config().train
    assert (train.epochs, train.iterations) == (15, None)
    assert "epochs: 15  # trainer.total_epochs" in unread.text()
    assert "cosine depends on the number of iterations, which is unknown: set actor.lr_schedule" in comments(unread)
    steps = convert(script(tmp_path, *QUICKSTART), "verl", ["trainer.total_training_steps=70"]).config().train
    assert (steps.epochs, steps.iterations) == (None, 70)
    trl = ["--model_name_or_path=m", "--dataset_name=nowhere.parquet", "--num_processes=1"]
    path = script(tmp_path, *trl, start="trl grpo")
    default = convert(path, "trl")
    assert default.config().train.epochs == 3
    assert "epochs: 3.0  # TRL's default" in default.text()
    assert convert(path, "trl", ["--num_train_epochs=0.5"]).config().train.epochs == 0.5
    openrlhf = convert(SCRIPTS / "openrlhf_ppo.sh", "openrlhf", NEEDED["openrlhf_ppo"])
    assert "1 (train.num_episodes) x 100000 rows / 1024 prompts; if the data has as many" in comments(openrlhf)


def test_the_rows_that_are_taken_may_be_limited(tmp_path: Path) -> None:
    data = tmp_path / "train.parquet"
    pq.write_table(pa.table({"prompt": ["p"] * 5000}), data)
    for most, rows in ((4000, 4000), (100_000, 5000)):
        settings = [*NEEDED["openrlhf_ppo"], "--data.prompt_dataset", str(data), "--data.max_samples", str(most)]
        converted = convert(SCRIPTS / "openrlhf_ppo.sh", "openrlhf", settings)
        assert converted.config().train.iterations == rows // 1024


def test_dynamic_sampling_without_data_needs_a_number(tmp_path: Path) -> None:
    """An epoch says nothing there, and a number that nobody gave would be wrong."""
    converted = convert(SCRIPTS / "verl_dapo.sh", "verl")
    says = "the data cannot be read here: set it, to at most 1 (trainer.total_epochs) x rows / 1536"
    assert says in comments(converted)
    with pytest.raises(UserError, match="train: iterations and epochs are both null: set one"):
        converted.config()
    path = tmp_path / "run.yaml"
    path.write_text(converted.text())
    assert load_config(path, ["train.iterations=5"]).iterations == 5


def test_a_value_cannot_leave_its_comment_and_secrets_are_not_repeated(tmp_path: Path) -> None:
    hostile = "trainer.project_name='a\nmodel: {path: evil} \x1b[2J # b'"
    text = convert(script(tmp_path, *QUICKSTART, hostile), "verl").text()
    assert yaml.safe_load(text)["model"] == {"path": "Qwen/Qwen2.5-0.5B-Instruct"}
    assert "\x1b" not in text
    with pytest.raises(
        UserError, match=r"run\.sh: trainer\.hub_token is not a known setting of verl: remove it"
    ) as refused:
        convert(script(tmp_path, *QUICKSTART, "trainer.hub_token=abc123"), "verl")
    assert "abc123" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "program", "says"),
    [
        (["data.train_batch_size=many"], "verl", ["data.train_batch_size is 'many': it should be a number"]),
        (
            ["actor_rollout_ref.rollout.n=1.5", "trainer.nnodes=x", "a.b"],
            "verl",
            ["'a.b' is not an override: it should be key=value"],
        ),
        (
            ["actor_rollout_ref.rollout.n=1.5", "trainer.nnodes=x"],
            "verl",
            ["rollout.n is 1.5: it should be a whole number", "trainer.nnodes is 'x': it should be a number"],
        ),
        (["a.b=1"], "openrlhf", ["has no command that starts openrlhf: give the script that does, or another --from"]),
    ],
)
def test_mistakes_in_the_settings_are_named_together(
    tmp_path: Path, settings: list[str], program: str, says: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        convert(script(tmp_path, *settings), program)
    lines = str(refused.value).splitlines()
    assert len(lines) == len(says)
    for line, text in zip(lines, says, strict=True):
        assert text in line
        assert "run.sh" in line


def test_files_that_are_not_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nothing\.sh: No such file"):
        convert(tmp_path / "nothing.sh", "verl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not text: give a YAML file or a shell script"):
        convert(tmp_path / "binary", "verl")
    (tmp_path / "other.yaml").write_text("foo: {bar: 1}")
    with pytest.raises(UserError, match="has no settings of TRL"):
        convert(tmp_path / "other.yaml", "trl")


MEGATRON = "actor_rollout_ref.actor.megatron"
DISTILLATION = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=1",
    "distillation.enabled=True",
    "distillation.teacher_models.teacher_model.model_path=Qwen/Qwen3-32B",
    "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=2",
    "distillation.distillation_loss.loss_mode=k1",
    "distillation.distillation_loss.topk=64",
    "distillation.distillation_loss.use_task_rewards=False",
    "distillation.distillation_loss.use_policy_gradient=True",
    "distillation.distillation_loss.loss_max_clamp=10.0",
    "distillation.distillation_loss.log_prob_min_clamp=-10.0",
    "actor_rollout_ref.actor.clip_ratio_high=0.5",
]


def test_verls_switch_of_the_engine_is_read(tmp_path: Path) -> None:
    given = [
        "model_engine=megatron",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        f"{MEGATRON}.tensor_model_parallel_size=4",
        f"{MEGATRON}.param_offload=True",
        f"{MEGATRON}.router_replay.mode=R3",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
        f"{MEGATRON}.override_transformer_config.recompute_granularity=full",
        "trainer.n_gpus_per_node=8",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=8",
    ]
    converted = convert(script(tmp_path, *QUICKSTART, *given, "hydra.run.dir=x"), "verl")
    actor = converted.config().actor
    assert actor.engine.model_dump(include={"type", "pipeline_parallel", "tensor_parallel"}) == {
        "type": "megatron",
        "pipeline_parallel": 2,
        "tensor_parallel": 4,
    }
    assert actor.offload_when_idle
    assert converted.config().rollout.router_replay
    assert "recompute_granularity=full: changes memory, speed or rounding only" in comments(converted)
    veomni = ["model_engine=veomni", *given[-3:]]
    actor = convert(script(tmp_path, *QUICKSTART, *veomni), "verl", [STEPS]).config().actor
    assert (actor.engine.type, actor.lr_schedule.type) == ("fsdp", "cosine"), "veomni's default"


def test_verls_distillation_has_a_teacher_and_no_estimator(tmp_path: Path) -> None:
    converted = convert(script(tmp_path, *QUICKSTART, *DISTILLATION), "verl")
    config = converted.config()
    assert config.teacher is not None
    assert config.teacher.path == "Qwen/Qwen3-32B"
    assert config.algorithm.distillation is not None
    assert config.algorithm.distillation == Distillation(coef=1.0, clamp=10.0)
    assert (config.algorithm.advantage.type, config.rollout.n) == ("none", 1)
    assert config.algorithm.loss.clip_ratio_high == 0.2, "the loss of the distillation has bounds of its own"  # type: ignore[union-attr]


def test_verls_teachers_keep_their_data_sources(tmp_path: Path) -> None:
    prefix = "+distillation.teacher_models"
    several = [setting for setting in DISTILLATION if "teacher_models" not in setting]
    several += [f"{prefix}.math.key=openai/gsm8k", f"{prefix}.math.model_path=Qwen/Qwen3-32B"]
    several += [f"{prefix}.code.model_path=Qwen/Qwen3-8B"]
    config = convert(script(tmp_path, *QUICKSTART, *several, f"{prefix}.code.key=taco"), "verl").config()
    assert config.teacher is not None
    found = {source: model.path for source, model in config.teacher.by_source.items()}
    assert found == {"openai/gsm8k": "Qwen/Qwen3-32B", "taco": "Qwen/Qwen3-8B"}
    with pytest.raises(UserError, match=r"teacher_models.code has no key, and there are 2 models: set the data_source"):
        convert(script(tmp_path, *QUICKSTART, *several), "verl")


def test_arguments_of_vllm_are_passed_on(tmp_path: Path) -> None:
    prefix = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    given = [f"{prefix}.kv_cache_dtype=fp8", f"+{prefix}.compilation_config.cudagraph_mode=FULL_DECODE_ONLY"]
    engine = convert(script(tmp_path, *QUICKSTART, *given), "verl").config().rollout.engine
    assert engine.model_dump()["args"] == {
        "kv_cache_dtype": "fp8",
        "compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"},
    }


def test_trls_vespo_on_a_dataset_of_the_hub(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    given = {
        "model_name_or_path": "m",
        "dataset_name": "openai/gsm8k",
        "dataset_config": "main",
        "num_generations": 8,
        "num_train_epochs": 2,
        "loss_type": "vespo",
        "vespo_k_pos": 1.5,
        "use_vllm": True,
        "vllm_importance_sampling_mode": "token_truncate",
    }
    path.write_text(yaml.safe_dump(given))
    config = convert(path, "trl").config()
    assert config.data.train == ("openai/gsm8k:main/train",) and config.train.epochs == 2
    loss = config.algorithm.loss.model_dump()
    assert (loss["type"], loss["k_pos"], loss["lambda_pos"], loss["aggregate"]) == ("vespo", 1.5, 3.0, "token-mean")
    assert config.algorithm.rollout_correction is not None and config.algorithm.rollout_correction.bypass


def test_verls_validation_draws_as_it_is_told(tmp_path: Path) -> None:
    given = ["actor_rollout_ref.rollout.val_kwargs.top_p=0.7", "actor_rollout_ref.rollout.top_k=50"]
    validation = convert(script(tmp_path, *QUICKSTART, *given), "verl").config().validation
    assert (validation.top_p, validation.top_k) == (0.7, 0), "top_k is verl's default"


VIDEOS = "models see texts and images only here"


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (f"{MEGATRON}.router_replay.mode=R2", "only the rollout's routes are repeated: set R3, or disabled"),
        ("critic.router_replay.mode=R3", "only the actor repeats the rollout's routes: set disabled"),
        (f"{MEGATRON}.override_transformer_config.moe_aux_loss_coeff=0.01", "has no load-balancing loss"),
        ("data.image_key=pictures", "data.image_key is pictures: the column is images, or image: rename it"),
        ("data.video_key=videos", VIDEOS),
        ("data.train_files=$HOME/data/tinyllava-video-r1/train.parquet", VIDEOS),
        ("data.mm_processor_kwargs.max_pixels=1000", "images are processed as preprocessor_config.json says"),
        ("algorithm.adv_estimator=mine", "choose one of gae, grpo"),
        ("actor_rollout_ref.model.mtp.enable_train=True", "are not trained: set false"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "set rollout.tools or rollout.environment"),
        ("actor_rollout_ref.actor.optim.optimizer=Muon", "the optimizer is AdamW: remove it"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=wsd", "choose constant, linear or cosine"),
        ("reward.reward_manager.name=prime", "set naive"),
        ("async_training.staleness_threshold=0.5", "async_training is set (async_training.staleness_threshold)"),
        (
            "actor_rollout_ref.rollout.temprature=1",
            "is not a known setting of verl: is it actor_rollout_ref.rollout.temperature? If not, remove it",
        ),
        ("algorithm.foo=1", "algorithm.foo=1 is not a known setting of verl: remove it"),
        ("distillation.enabled=True", "loss_mode is k3: algorithm.distillation learns from the log-probs of drawn"),
    ],
)
def test_a_setting_that_changes_the_result_is_converted_or_refused(tmp_path: Path, setting: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        convert(script(tmp_path, *QUICKSTART, setting), "verl")
    [line] = str(refused.value).splitlines()
    assert says in line
    assert line.startswith(f"{tmp_path}/run.sh: ")


@pytest.mark.parametrize(
    ("settings", "frozen", "says"),
    [
        (["data.image_key=images"], False, "# verl trains the vision tower unless told"),
        (["data.train_files=$HOME/data/geo3k/train.parquet"], False, "# verl trains the vision tower unless told"),
        (["data.image_key=images", "actor_rollout_ref.actor.freeze_vision_tower=True"], True, "freeze_vision_tower"),
        (["actor_rollout_ref.actor.freeze_vision_tower=False"], False, "freeze_vision_tower"),
        (["data.image_key=images", "actor_rollout_ref.model.exclude_modules='.*visual.*'"], True, None),
        ([], True, None),
    ],
)
def test_verls_scripts_with_images(tmp_path: Path, settings: list[str], frozen: bool, says: str | None) -> None:
    converted = convert(script(tmp_path, *QUICKSTART, "data.image_patch_size=16", *settings), "verl")
    assert converted.config().model.freeze_vision == frozen
    [comment] = [line for line in converted.text().splitlines() if "freeze_vision:" in line] or [""]
    assert (says or "") in comment
    assert bool(comment) == (says is not None)
    assert "data.image_patch_size=16: the model's processor knows its patches" in converted.text()


def test_other_programs_freeze_the_vision_tower_as_they_are_told(tmp_path: Path) -> None:
    openrlhf = SCRIPTS / "openrlhf_dapo.sh"
    assert "freeze_vision" not in convert(openrlhf, "openrlhf").text()
    sees = ["--data.max_images_per_prompt", "1", "--data.image_key", "images"]
    assert not convert(openrlhf, "openrlhf", sees).config().model.freeze_vision
    assert convert(openrlhf, "openrlhf", [*sees, "--actor.freeze_visual_encoder"]).config().model.freeze_vision
    vlm = '[model.vlm]\nvision_encoder_attr = "model.visual"\nlanguage_model_attr = "model.language_model"\n'
    for name, vision in (("frozen", ""), ("trained", "freeze_vision_encoder = false\n")):
        path = tmp_path / f"{name}.toml"
        path.write_text(PRIME_RL + vlm + vision)
        assert convert(path, "prime-rl").config().model.freeze_vision == (not vision)
    trl = ["--model_name_or_path=m", "--dataset_name=p.parquet", "--num_processes=1"]
    path = script(tmp_path, *trl, start="accelerate launch examples/scripts/grpo_vlm.py")
    assert "too: so does model.freeze_vision=false" in convert(path, "trl").text()


@pytest.mark.parametrize(
    ("program", "settings", "says"),
    [
        ("openrlhf", ["--reward.normalize_enable"], "a reward model's score is used as it is"),
        ("openrlhf", ["--train.agent_func_path", "a.py"], "write it as rollout.environment or rollout.agent"),
        ("openrlhf", ["--data.image_key", "pictures"], "the column is images, or image: rename it"),
        ("openrlhf", ["--actor.optim", "muon"], "the optimizer is AdamW: set adam"),
        ("openrlhf", ["--actor.lrr", "1"], "is not a known setting of OpenRLHF"),
        ("trl", ["--mask_truncated_completions"], "set false, and see algorithm.overlong_penalty"),
        ("trl", ["--loss_type", "luspo"], "choose one of grpo, dr_grpo, dapo, bnpo, cispo, sapo, vespo"),
        ("trl", ["--eval_strategy", "steps"], "set no, and then validation.data"),
        ("trl", ["--bta", "0.1"], "is it beta? If not, remove it"),
    ],
)
def test_other_programs_settings_are_refused_by_name_too(
    tmp_path: Path, program: str, settings: list[str], says: str
) -> None:
    trl = [
        "--model_name_or_path=m",
        "--dataset_name=p.parquet",
        "--num_processes=1",
        "--beta=0",
        "--learning_rate=1e-6",
    ]
    path = SCRIPTS / "openrlhf_dapo.sh" if program == "openrlhf" else script(tmp_path, *trl, start="trl grpo")
    assert convert(path, program).config()
    with pytest.raises(UserError) as refused:
        convert(path, program, settings)
    [line] = str(refused.value).splitlines()
    assert says in line


@pytest.mark.parametrize(
    ("start", "program", "says"),
    [
        ("torchrun -m verl.trainer.sft_trainer", "verl", "supervised fine-tuning: see `ratchet sft`"),
        ("python3 -m verl.trainer.main_generation_server", "verl", "no training: see `ratchet evaluate`"),
        ("trl rloo", "trl", "a trainer that is not converted"),
        ("python examples/scripts/online_dpo.py", "trl", "a trainer that is not converted"),
        ("deepspeed --module openrlhf.cli.train_dpo", "openrlhf", "learning from pairs or labels is not here"),
    ],
)
def test_another_training_is_refused(tmp_path: Path, start: str, program: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        convert(script(tmp_path, "--a=1", start=start), program)
    assert says in str(refused.value)


PRIME_RL = (SCRIPTS / "prime_rl.toml").read_text()


def test_prime_rls_max_rl_and_arguments_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    text = PRIME_RL.replace("[trainer.optim]", '[orchestrator.algo]\ntype = "max_rl"\n[trainer.optim]')
    text = text.replace("[trainer.optim]", "[trainer]\nenable_router_replay = true\n[trainer.optim]")
    path.write_text(text.replace("[inference.vllm]", "[inference.vllm]\nmax_num_seqs = 64"))
    config = convert(path, "prime-rl").config()
    assert config.algorithm.advantage.type == "max_rl"
    assert config.rollout.router_replay
    assert config.rollout.engine.model_dump()["args"] == {"max_num_seqs": 64}


def test_prime_rls_toml_is_converted(tmp_path: Path) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(PRIME_RL)
    converted = convert(path, "prime-rl")
    config = converted.config()
    assert (config.data.prompts_per_iteration, config.rollout.n, config.actor.mini_batch_trajectories) == (16, 16, 256)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (3072, 1024)
    assert (config.rollout.mode, config.rollout.max_staleness, config.rollout.partial) == ("async", 4, True)
    assert config.rollout.agent is not None, "environments of verifiers are agents"
    assert config.rollout.agent.options == {"environment": "words", "arguments": {"taskset": {"min_turns": 3}}}
    assert config.algorithm.advantage.type == "dr_grpo"
    assert config.algorithm.advantage.drop_zero_std_groups
    assert config.algorithm.loss.model_dump(exclude={"aggregate"}) == {
        "type": "dppo_tv",
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 1e6,
        "kl_coef": 1e-3,
    }
    assert config.bypass
    assert config.algorithm.dynamic_sampling is not None
    assert (config.pools["actor"].workers, config.pools["rollout"].workers, config.placement) == (2, 6, "separate")
    assert (config.actor.lr, config.actor.optimizer.weight_decay, config.iterations) == (3e-6, 0.01, 50)
    assert "trainer.model.compile={}: changes memory, speed or rounding only" in comments(converted)
    assert convert(path, "prime-rl", ["--max_steps", "7"]).config().iterations == 7


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("lr = 3e-6", 'type = "muon"'), "trainer.optim.type is muon: the optimizer is AdamW: set adamw"),
        (('id = "null"', 'id = "bash"'), "harness is bash, a program around the policy: write a rollout.agent"),
        (
            ("[trainer.optim]", '[[orchestrator.train.source]]\nname = "other"\n[trainer.optim]'),
            "has 2 environments (words, other): a run has one; keep one",
        ),
        (
            ("[trainer.optim]", '[orchestrator.algo]\ntype = "rae"\n[trainer.optim]'),
            "orchestrator.algo.type is rae, which algorithm.advantage.type does not have: choose one of grpo",
        ),
        (
            ("[trainer.optim]", '[[orchestrator.eval.source]]\nname = "aime"\n[trainer.optim]'),
            "orchestrator.eval has aime: validation runs in the training's environment",
        ),
        (("max_steps", "max_stpes"), "max_stpes=50 is not a known setting of prime-rl: is it max_steps?"),
        (("[orchestrator", "[trainer.a"), "has no section orchestrator, so it starts no reinforcement learning"),
        (("max_steps = 50", "max_steps ="), "is not valid TOML: Invalid value (at line 1, column 12)"),
    ],
)
def test_prime_rls_settings_are_refused_by_name(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    path = tmp_path / "rl.toml"
    path.write_text(PRIME_RL.replace(*change))
    with pytest.raises(UserError) as refused:
        convert(path, "prime-rl")
    [line] = str(refused.value).splitlines()
    assert says in line


OURS = {re.sub(r"\[.*?\]", "", key) for key, *_ in keys(RunConfig)}


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_the_tables_name_keys_that_there_are(source: Source) -> None:
    for row in source.counterparts:
        for ours in row.ours:
            known = ours in OURS or any(other.startswith(f"{ours}.") for other in OURS)
            assert known or ours.startswith("pools.") or ours in ("algorithm.advantage.type", "algorithm.loss.type"), (
                ours
            )
        assert row.theirs or not row.is_direct
        assert row.note or row.ours, f"{row.theirs} needs a reason"
    settings = Settings({}, source.defaults)
    assert settings["nothing"] is None
    today = {name for row in source.counterparts for name in row.theirs}
    for new in source.older.values():
        wildcard = any(name.startswith(new.removesuffix("*")) for name in today)
        assert source.counterpart(new) is not None or (new.endswith("*") and wildcard), new
    assert [key for key in source.defaults if key not in today] == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.adv_estimator=grpo", "is a key of verl: write algorithm.advantage.type=grpo"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "is a key of verl: write actor.lr=1.0e-06"),
        ("actor_rollout_ref.rollout.n=5", "is a key of verl: write rollout.n=5"),
        (
            "data.train_batch_size=64",
            "is a key of verl: write data.prompts_per_iteration=64 (prompts, not trajectories)",
        ),
        ("actor.learning_rate=1e-6", "is not a key of the config: write actor.lr=1.0e-06"),
        ("learning_rate=1e-6", "is a key of TRL (GRPO): write actor.lr=1.0e-06"),
        ("actor_rollout_ref.rollout.top_k=50", "write rollout.top_k=50"),
        ("actor_rollout_ref.rollout.top_k=-1", "write rollout.top_k=0"),
        ("num_generations=8", "is a key of TRL (GRPO): write rollout.n=8"),
        ("min_p=0.1", "is a key of TRL (GRPO): write rollout.min_p=0.1"),
        ("rollout.tensor_model_parallel_size=2", "write rollout.engine.tensor_parallel=2"),
        ("reward_model.num_workers=4", "is a key of verl: write reward.workers=4"),
        ("n_samples_per_prompt=4", "is a key of OpenRLHF: write rollout.n=4"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "write algorithm.loss.type=ppo"),
    ],
)
def test_an_unknown_key_is_answered_with_what_to_write(tmp_path: Path, override: str, says: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: p}\nrollout: {engine: vllm}\n")
    with pytest.raises(UserError) as refused:
        load_config(path, [override])
    text = str(refused.value)
    assert text == f"{path}: {override.partition('=')[0]} {text.partition(' ')[2].partition(' ')[2]}"
    assert says in text
    fix = text.partition(": write ")[2].split()[0]
    fixed = load_config(path, [fix, *(["rollout.n=8"] if "grpo" in fix else [])])
    key, _, value = fix.partition("=")
    assert fixed.value(key) == yaml.safe_load(value)


def test_every_key_of_another_program_is_answered_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: {train: p}\n")
    with pytest.raises(UserError) as refused:
        load_config(path, QUICKSTART)
    lines = str(refused.value).splitlines()
    assert [line for line in lines if "ratchet train --help" in line] == []
    answered = {line.removeprefix(f"{path}: ").partition(" ")[0] for line in lines}
    assert answered == {setting.partition("=")[0] for setting in QUICKSTART} - {"critic.model.path"}, (
        "which is ours, too"
    )
    with pytest.raises(UserError, match=r"trainer\.balance_batch has no counterpart here \(.*\): remove it"):
        load_config(path, ["trainer.balance_batch=true"])
    with pytest.raises(UserError, match=r"is it critic\.mini_batch_trajectories or"):
        load_config(path, ["critic.mini_batch_trajectoris=4"])
    with pytest.raises(UserError, match=r": foo is not a key of the config;"):
        load_config(path, ["foo.bar=4"])


def test_a_table_says_which_examples_convert_and_why_others_do_not(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(PRIME_RL)
    (tmp_path / "muon.toml").write_text(PRIME_RL.replace("lr = 3e-6", 'type = "muon"'))
    (tmp_path / "sft.toml").write_text('[model]\nname = "m"')
    assert table("prime-rl", tmp_path, "Today").splitlines()[2:] == [
        "Today: 1 of 2 trainings convert. The last 1 files start others, or none.",
        "",
        "| example | result |",
        "|---|---|",
        "| `muon.toml` | refused: trainer.optim.type is muon: the optimizer is AdamW: set adamw |",
        "| `rl.toml` | converts |",
        "| `sft.toml` | refused: has no section orchestrator, so it starts no reinforcement learning: see "
        "`ratchet sft` |",
    ]
    program = tmp_path / "grpo.py"
    program.write_text('"""Run it:\n\n```\npython grpo.py \\\n    --dataset_name p.parquet --beta 0\n```\n"""\n')
    assert problems(program, "trl") == ["model.path is missing: set it"]
