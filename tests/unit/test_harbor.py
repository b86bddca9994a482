"""Tasks of Harbor: what is read of their folders, and what an episode in a sandbox is worth."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ratchet.rlhf.agents.agent_loop import Rules
from ratchet.rlhf.data import files
from ratchet.rlhf.data.folders import data_files
from ratchet.rlhf.data.harbor import read_task
from ratchet.rlhf.data.prompts import PromptDataset
from ratchet.rlhf.environments.dialogues import Beginning, Dialogue
from ratchet.rlhf.environments.environment import Observation, check_environment
from ratchet.rlhf.environments.guarded_calls import EnvironmentCalls
from ratchet.rlhf.environments.harbor import SMALL, Environment
from ratchet.rlhf.errors import RatchetError, UserError
from ratchet.rlhf.rollout.engine import Request
from ratchet.testing import check_environment as check_played
from tests import tiny
from tests.environments import Typed
from tests.extras import needs
from tests.harbor_tasks import DOCKERFILE, SETTINGS, task
from tests.unit.test_environments import PROMPT, SAMPLING, ScriptedEngine, generator_of, id_of, wait_for


def test_a_folder_of_tasks_is_a_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "chores"
    task(folder / "b", instruction="Second")
    first = task(folder / "a", instruction="First")
    (folder / "README.md").write_text("no task")
    dataset = PromptDataset([folder])
    assert [prompt.messages for prompt in dataset] == [
        [{"role": "user", "content": text}] for text in ("First", "Second")
    ]
    assert {prompt.data_source for prompt in dataset} == {"chores"}
    info = json.loads(dataset[0].extra_info)
    assert info == {"task": str(first), "digest": read_task(first).digest}
    assert files.count(str(folder)) == 2 and data_files(str(first)) == [str(first)]
    before = dataset.digest
    (first / "solution" / "solve.sh").write_text("other")
    assert PromptDataset([folder]).digest == before, "nobody reads the solution"
    (first / "tests" / "test.sh").chmod(0o755)
    assert PromptDataset([folder]).digest != before


def test_what_a_task_says_of_its_machine(tmp_path: Path) -> None:
    more = "COPY ./words.txt /data/w.txt\nWORKDIR inner\nADD . .\nENV OLD form\n"
    settings = '[environment]\nmemory = "1.5G"\nenv = { SIZE = "small" }\n[verifier]\nenv = { KEY = "k" }\n'
    folder = task(tmp_path / "t", dockerfile=DOCKERFILE + more, settings=settings)
    read = read_task(folder)
    assert (read.workdir, read.memory_mb, read.verifier_seconds) == ("/app/inner", 1536, 600.0)
    assert read.env == {"COLOR": "red", "SIZE": "small", "OLD": "form"} and read.verifier_env == {"KEY": "k"}
    targets = [(copy.source.name, copy.target) for copy in read.copies]
    assert targets == [
        ("words.txt", "/app/notes/words.txt"),
        ("words.txt", "/data/w.txt"),
        ("environment", "/app/inner"),
    ]
    task(folder, dockerfile="FROM x\nRUN apt-get install \\\n  -y curl\n")
    assert read_task(folder, skip_run=True).workdir == "/app"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": "= 1"}, r"cannot read .*task.toml: Invalid statement"),
        ({"settings": '[[steps]]\nname = "a"\n'}, r"has \[\[steps\]\]: only tasks of one step"),
        ({"settings": '[environment]\nmemory = "much"\n'}, "environment.memory is much: write memory_mb"),
        (
            {"settings": '[verifier]\nenv = { KEY = "${SECRET}" }\n'},
            r"verifier.env.KEY is \$\{SECRET\}: write the value",
        ),
        ({"dockerfile": "RUN apt-get install curl\n"}, r"`RUN apt-get install curl`, which a sandbox cannot.*skip_run"),
        ({"dockerfile": "COPY --from=a /b /c\n"}, "copies what environment/ does not have"),
        ({"dockerfile": "COPY ../task.toml /c\n"}, "copies what environment/ does not have"),
        ({"dockerfile": "COPY nothing /c\n"}, "copies what environment/ does not have"),
        ({"more": {"environment/docker-compose.yaml": ""}}, "one machine without network"),
    ],
)
def test_a_task_that_needs_more_than_a_sandbox_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = task(tmp_path / "t", **changes)
    with pytest.raises(UserError, match=says):
        read_task(folder)


def test_a_folder_without_a_script_is_no_task(tmp_path: Path) -> None:
    folder = task(tmp_path / "t")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(UserError, match=r"has no tests/test.sh"):
        read_task(folder)
    (folder / "task.toml").unlink()
    with pytest.raises(UserError, match="is no task of Harbor"):
        read_task(folder)


def block(command: str) -> str:
    return f"So:\n```bash\n{command}\n```\n"


def begun(folder: Path, **options: Any) -> Environment:
    made = Environment(**{"commands": "blocks", **options})
    made.reset([], None, {"task": str(folder), "digest": read_task(folder, skip_run=True).digest})
    return made


@pytest.fixture
def hello(tmp_path: Path) -> Iterator[Environment]:
    made = begun(task(tmp_path / "hello"))
    yield made
    made.close()


def said(environment: Environment, command: str) -> str:
    content = environment.step(block(command), "key").content
    assert isinstance(content, list)
    return str(content[0]["content"])


@needs("bubblewrap")
def test_an_episode(hello: Environment) -> None:
    assert said(hello, "pwd; cat notes/words.txt; echo $COLOR, $SIZE") == "/app\nsome words\nred, very large\n"
    assert said(hello, "ls /tests /solution 2>&1").startswith("ls: cannot access '/solution'"), (
        "and the tests are empty"
    )
    assert said(hello, "cd /tmp; X=1; exit 7") == "[exit code 7]"
    assert said(hello, "pwd; echo $X") == "/app\n\n"
    assert said(hello, "echo hello > out.txt; yes | head -c 9000").endswith(
        "y\n\n[1000 bytes are left out]\ny\n" + 1999 * "y\n"
    )
    assert hello.step("I am done.", "key") == Observation(None, 1.0)


@needs("bubblewrap")
def test_what_the_policy_puts_in_the_way_of_the_script_does_not_count(hello: Environment) -> None:
    said(hello, "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json; ln -s /app /tests/x")
    assert hello.step("done", "key") == Observation(None, 0.0)


@needs("bubblewrap")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt", Observation(None, 0.25)),
        (
            'echo \'{"reward": 0.5, "style": 2}\' > /logs/verifier/reward.json',
            Observation(None, 0.5, parts={"style": 2.0}),
        ),
        (
            'echo \'{"a": 0, "b": 1}\' > /logs/verifier/reward.json',
            Observation(None, 0.5, parts={"a": 0.0, "b": 1.0}),
        ),
        ("[ $KEY = k ] && cd $(dirname $0) && cat number > /logs/verifier/reward.txt", Observation(None, 3.0)),
        ("echo nan > /logs/verifier/reward.txt; exit 3", "ended with 3 and wrote no reward"),
        ("echo much; exit 0", "ended with 0 and wrote no reward to /logs/verifier: much"),
    ],
)
def test_the_script_gives_the_reward(tmp_path: Path, script: str, expected: Observation | str) -> None:
    settings = SETTINGS.replace("[environment]", 'env = { KEY = "k" }\n[environment]')
    made = begun(task(tmp_path / "t", test=script, settings=settings, more={"tests/number": "3"}))
    found = made.ended()
    made.close()
    if isinstance(expected, str):
        assert found.reward == 0 and expected in str(found.error)
    else:
        assert found == expected


@needs("bubblewrap")
def test_tools_and_what_is_no_call(tmp_path: Path) -> None:
    made = begun(task(tmp_path / "t"), commands="tools")

    def call(**arguments: Any) -> Any:
        return made.step(f"<tool_call>{json.dumps({'name': 'shell', 'arguments': arguments})}</tool_call>", "k").content

    assert call(command="echo hello | tee out.txt") == [{"role": "tool", "name": "shell", "content": "hello\n"}]
    [wrong] = call(cmd="ls")
    assert "there is only the tool shell" in wrong["content"]
    assert made.step("done", "k").reward == 1
    made.close()
    assert Environment.schemas()[0]["function"]["name"] == "shell" and Environment.schemas("blocks") == []
    with pytest.raises(UserError, match="commands is 'calls': write tools or blocks"):
        check_environment("harbor", {"commands": "calls"})


@needs("bubblewrap")
def test_each_turn_can_be_the_last_before_a_crash(tmp_path: Path) -> None:
    folder = task(tmp_path / "t")
    info = {"task": str(folder), "digest": read_task(folder).digest}
    turns = [*(block(text) for text in ("echo hello > out.txt", "cat out.txt", "rm out.txt; ls")), "done"]
    found = check_played("harbor", turns, {"extra_info": info}, commands="blocks")
    assert [observation.reward for observation in found] == [0, 0, 0, 0]
    assert found[1].content == [{"role": "user", "content": "hello\n"}]


@needs("bubblewrap")
def test_large_files_need_a_folder_for_snapshots(tmp_path: Path) -> None:
    folder, snapshots = task(tmp_path / "t"), tmp_path / "snapshots"
    made = begun(folder)
    said(made, f"head -c {2 * SMALL} /dev/urandom > large; cksum large > sum")
    with pytest.raises(RatchetError, match=r"take .* KiB: set rollout.environment.options.snapshots"):
        made.snapshot()
    made.close()
    made = begun(folder, snapshots=str(snapshots))
    said(made, f"head -c {2 * SMALL} /dev/urandom > large; cksum large > sum")
    state = made.snapshot()
    made.close()
    assert len(state) < 1000
    [stored] = snapshots.iterdir()
    again = Environment(commands="blocks", snapshots=str(snapshots))
    again.restore(state)
    assert said(again, "cksum large | diff - sum && echo same") == "same\n"
    again.close()
    with pytest.raises(UserError, match="the sandbox's files are not in"):
        Environment().restore(state)
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(UserError, match="the sandbox's files are not in"):
        again.restore(state)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    with pytest.raises(UserError, match="has changed since the run read it"):
        Environment().restore(json.dumps({**json.loads(state), "files": ""}))


@needs("bubblewrap")
def test_a_trajectory_that_the_policy_does_not_end_is_rewarded(tmp_path: Path) -> None:
    folder = task(tmp_path / "t", test="stat -c %s /app/ledger > /logs/verifier/reward.txt")
    info = json.dumps({"task": str(folder), "digest": read_task(folder).digest})
    tokenizer = AutoTokenizer.from_pretrained(tiny.model_folder(tmp_path / "model"))
    script = [["ba", "be", "bi", "bo"], ["ba", "b" * 400]]
    calls = EnvironmentCalls(Typed, {"folder": str(tmp_path / "notes")})
    generator = generator_of(ScriptedEngine(tokenizer, script))
    dialogues = [
        Dialogue(Request(id_of(number), PROMPT), Beginning([], None, False, info)) for number in range(len(script))
    ]
    generator.submit([(dialogue, Rules(SAMPLING, calls, 3)) for dialogue in dialogues])
    wait_for(generator, dialogues)
    assert [dialogue.finish_reason for dialogue in dialogues] == ["turns", "length"]
    assert [dialogue.turn_rewards for dialogue in dialogues] == [[0.0, 0.0, 3.0], [0.0, 1.0]]
