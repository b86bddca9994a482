"""Losses and advantage estimators in the user's code: how a config names them, and what `ratchet.testing` finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ratchet.rlhf.algorithms import Advantage, PolicyLoss
from ratchet.rlhf.algorithms.advantages import AdvantageEstimator
from ratchet.rlhf.algorithms.masked import LossNormalizers, sequence_sum
from ratchet.rlhf.algorithms.policy_losses import PPOClip, TokenLoss
from ratchet.rlhf.config import RunConfig, parse_config, stored_config
from ratchet.rlhf.config.user_algorithms import UserAdvantage, UserLoss, loaded
from ratchet.rlhf.errors import UserError
from ratchet.testing import check_advantage, check_environment, check_loss
from tests.padded import members
from tests.tiers import sampled

CODE = """
from typing import ClassVar
from ratchet.rlhf.algorithms.advantages import AdvantageEstimator
from ratchet.rlhf.algorithms.masked import sequence_sum
from ratchet.rlhf.algorithms.policy_losses import TokenLoss

class Clamped(TokenLoss):
    limit: float = 0.2

    def token_losses(self, log_probs, old_log_probs, advantages, mask):
        ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
        if self.limit > 9:
            raise KeyError("no such limit")
        return -ratio.clamp(max=1 + self.limit) * advantages, {"ratio": ratio}

class Abstract(TokenLoss):
    pass

class Short(TokenLoss):
    def token_losses(self, log_probs, old_log_probs, advantages):
        return -log_probs * advantages, {}

class Forgets(AdvantageEstimator):
    def __call__(self, token_rewards, mask, values):
        return token_rewards * mask, token_rewards * mask

class Stops(Clamped):
    def __init__(self, **options):
        raise KeyError("no model")

class Centred(AdvantageEstimator):
    needs: ClassVar[tuple[str, ...]] = ("group_ids", "values")

    def __call__(self, token_rewards, mask, group_ids, values):
        advantages = self.finished(sequence_sum(token_rewards, mask)[:, None] - values, mask)
        return advantages, advantages

def function(): ...
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    return tmp_path / "mine.py"


def config(**algorithm: Any) -> RunConfig:
    return parse_config({"model": {"path": "m"}, "data": {"train": "p"}, "algorithm": algorithm}, "run.yaml")


def test_a_config_names_the_users_classes(code: Path) -> None:
    chosen = config(loss={"type": f"{code}:Clamped", "options": {"limit": 0.5}}, advantage=f"{code}:Centred")
    assert chosen.needs_critic, "its advantage needs values"
    loss = loaded(chosen.algorithm.loss)
    found, metrics = loss(*(torch.tensor([[x]]) for x in (1.0, 0.0, 2.0, 1.0)), LossNormalizers(1, 1, 1))
    assert found.item() == pytest.approx(-1.5 * 2)
    assert metrics["ratio"].item() == pytest.approx(torch.e)
    for algorithm in (chosen.algorithm.loss, chosen.algorithm.advantage):
        assert isinstance(algorithm, UserLoss | UserAdvantage)
        algorithm.check()
    assert config(loss="ppo").algorithm.loss == loaded(config().algorithm.loss) == PPOClip()


def test_a_script_that_ends_when_it_is_imported(code: Path) -> None:
    code.write_text("raise SystemExit('usage: mine.py FILE')")
    with pytest.raises(UserError, match=r"SystemExit: usage: mine\.py FILE; name "):
        config(loss=f"{code}:Clamped")


def test_a_stored_config_is_read_without_the_code(code: Path) -> None:
    chosen = config(loss=f"{code}:Clamped", advantage=f"{code}:Centred")
    code.write_text("raise SystemExit('imported')")
    stored = stored_config(chosen.model_dump(mode="json"), "the store")
    assert stored == chosen
    assert stored.with_values({"actor.lr": 1e-3}).needs_critic
    tree = chosen.model_dump(mode="json")
    del tree["algorithm"]["loss"]["needs"]
    with pytest.raises(UserError, match="needs is missing from a stored config"):
        stored_config(tree, "the store")


def test_facts_of_another_version_of_the_class_are_noticed(code: Path) -> None:
    chosen = config(advantage=f"{code}:Centred")
    code.write_text(CODE.replace('("group_ids", "values")', '("group_ids", "values", "entropy")'))
    assert isinstance(chosen.algorithm.advantage, UserAdvantage)
    with pytest.raises(UserError, match=r"needs of the class is .*entropy.*set algorithm.advantage to .* again"):
        chosen.algorithm.advantage.check()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("nowhere:Loss", "ModuleNotFoundError: No module named 'nowhere'; name package.module:Loss or file.py:Loss"),
        ("CODE:Missing", "has no Missing: name a function or a class"),
        ("CODE:function", "is no subclass of ratchet.rlhf.algorithms.policy_losses.PolicyLossBase"),
        ({"type": "CODE:Clamped", "options": {"limit": "x", "other": 1}}, "options.limit: .*\n.*options.other: "),
        ({"type": "CODE:Clamped", "options": {"limt": 1}}, "options.limt: .*CODE:Clamped has aggregate, limit"),
        ({"type": "CODE:Clamped", "options": [1]}, "options: Input should be a valid dictionary"),
        ("CODE:Abstract", "CODE:Abstract raised TypeError: .* abstract method '?token_losses"),
        ("CODE:Stops", r"CODE:Stops raised KeyError: 'no model' \(CODE:\d+\)"),
        ({"type": "ppo", "options": {"limit": 1}}, "options is no option of ppo, but of package.module:Class"),
        ({"type": "CODE:Clamped", "limit": 1}, "limit: values of the class's fields belong in algorithm.loss.options"),
        ("unknown", "input should be one of 'ppo', .*, or package.module:Class or file.py:Class"),
    ],
)
def test_mistakes_in_the_config(code: Path, loss: Any, message: str) -> None:
    if isinstance(loss, dict):
        loss["type"] = loss["type"].replace("CODE", str(code))
    else:
        loss = loss.replace("CODE", str(code))
    with pytest.raises(UserError, match=f"(?s)^run.yaml: algorithm.loss.*{message.replace('CODE', str(code))}"):
        config(loss=loss)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"loss": "CODE:Short"}, r"algorithm.loss CODE:Short raised TypeError: .*takes 4 positional arguments"),
        ({"advantage": "CODE:Forgets"}, "algorithm.advantage CODE:Forgets raised TypeError: .*argument: 'values'"),
    ],
)
def test_arguments_that_do_not_fit(code: Path, chosen: dict[str, str], message: str) -> None:
    ((key, name),) = chosen.items()
    algorithm = getattr(config(**{key: name.replace("CODE", str(code))}).algorithm, key)
    with pytest.raises(UserError, match=message.replace("CODE", str(code))):
        algorithm.check()


def test_an_exception_names_the_line(code: Path) -> None:
    chosen = config(loss={"type": f"{code}:Clamped", "options": {"limit": 10}}).algorithm.loss
    line = CODE.splitlines().index('            raise KeyError("no such limit")') + 1
    expected = f"algorithm.loss {code}:Clamped raised KeyError: 'no such limit' \\({code}:{line}\\)"
    with pytest.raises(UserError, match=expected):
        loaded(chosen)(*[torch.ones(1, 1)] * 4, LossNormalizers(1, 1, 1))
    assert isinstance(chosen, UserLoss)
    with pytest.raises(UserError, match=expected):
        chosen.check()


@sampled(4)
@pytest.mark.parametrize("kind", members(PolicyLoss))
def test_built_in_losses_pass(kind: Any) -> None:
    check_loss(kind())


@sampled(4)
@pytest.mark.parametrize("kind", members(Advantage))
def test_built_in_estimators_pass(kind: Any) -> None:
    check_advantage(kind(**({"parts": ("part",)} if "parts" in kind.model_fields else {})))


class Unclamped(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return -(log_probs - old_log_probs).mul(20).exp() * advantages, {}


class Sequence(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return (-log_probs * advantages).sum(-1), {}


class Unmasked(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return -log_probs * advantages.clamp(-1, 1).sum(-1, keepdim=True), {}


class OfTheBatch(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        scale = (advantages.abs() * mask).sum() / mask.sum().clamp(min=1)
        return -log_probs * advantages * scale, {}


class TakesAName(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return -log_probs * advantages, {"pg_loss": log_probs}


class Constant(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return advantages * mask, {}


class ForgetsOld(TokenLoss):
    needs: ClassVar[tuple[str, ...]] = ()

    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return -(log_probs - old_log_probs).clamp(-20, 20).exp() * advantages, {}


class Misspells(ForgetsOld):
    needs: ClassVar[tuple[str, ...]] = ("old_logprobs",)


class Lone(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return -log_probs * advantages


class Scalar(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return -log_probs * advantages, {"mean": log_probs.mean()}


class MaskedGradient(TokenLoss):
    @property
    def how(self) -> Any:
        return self.aggregate

    def reduced(self, loss: Any, metrics: Any, mask: Any, normalizers: Any, weights: Any) -> Any:
        return loss.clamp(-1e3, 1e3).sum() / 100, {}

    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return -log_probs.clamp(-9, 9) * 0 * mask - (log_probs - log_probs.detach()), {}


class Padded(TokenLoss):
    def token_losses(self, log_probs: Any, old_log_probs: Any, advantages: Any, mask: Any) -> Any:
        return -log_probs * advantages / mask.shape[1], {}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (ForgetsOld(), "old_log_probs change the loss, but are not among its needs"),
        (Misspells(), "needs names old_logprobs, which it cannot be given: choose among old_log_probs"),
        (Lone(), "should return the losses and a dict of metrics"),
        (Scalar(), r"returned the mean of shape \(\)"),
        (MaskedGradient(), "masked tokens get a gradient"),
        (Padded(), "padding changes the loss"),
        (Unclamped(), "is not finite where log-ratios or advantages are large: clamp"),
        (Sequence(), r"token_losses returned the loss of shape \(\d+,\): it should be a tensor of shape"),
        (Unmasked(), "values at masked tokens change the loss"),
        (OfTheBatch(), "micro-batches do not add up"),
        (Constant(), "does not depend on log_probs"),
        (TakesAName(), "the metric pg_loss is the trainer's own"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, TokenLoss) else "",
)
def test_a_wrong_loss_is_found(loss: TokenLoss, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_loss(loss)


class Estimator(AdvantageEstimator):
    needs: ClassVar[tuple[str, ...]] = ("group_ids",)
    how: str

    def __call__(self, token_rewards: Any, mask: Any, group_ids: Any) -> Any:
        scores = sequence_sum(token_rewards, mask)[:, None]
        found = {
            "divides": scores / (scores - scores.max()) * mask,
            "unmasked": scores.expand_as(mask),
            "garbage": token_rewards.clamp(-1, 1).sum(-1, keepdim=True) * mask,
            "width": scores / mask.shape[1] * mask,
            "order": (scores - scores[0]) * mask,
            "scalar": scores,
            "metrics": scores * mask,
        }[self.how]
        return (found, found, {"scores": scores}) if self.how == "metrics" else (found, found)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("divides", "not finite: guard divisions"),
        ("unmasked", "masked tokens get an advantage"),
        ("garbage", "values at masked tokens change the advantages"),
        ("width", "padding changes the advantages"),
        ("order", "the order of the trajectories changes the advantages"),
        ("scalar", "returned advantages of shape"),
        ("metrics", "returned the metrics .*: return a dict of numbers by their names"),
    ],
)
def test_a_wrong_estimator_is_found(how: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_advantage(Estimator(how=how))


def test_an_input_that_nothing_computes() -> None:
    class Asks(Estimator):
        needs: ClassVar[tuple[str, ...]] = ("fortune",)

    with pytest.raises(UserError, match="needs names fortune, which it cannot be given"):
        check_advantage(Asks(how="order"))


def test_needs_is_a_text() -> None:
    class Text(Estimator):
        needs: ClassVar[Any] = "values"

    with pytest.raises(UserError, match="needs is 'values': make it a tuple"):
        check_advantage(Text(how="order"))


def test_environments_are_played(tmp_path: Path) -> None:
    played = check_environment("calculator", ["<tool>6*7</tool>", "42"])
    assert [observation.content for observation in played] == ["<result>42</result>", None]
    (tmp_path / "shared.py").write_text(
        "from ratchet.rlhf.environments.environment import Observation\n"
        "class Environment:\n"
        "    stop, count = (), [0]\n"
        "    def reset(self, messages, ground_truth, extra_info): self.count[0] += 1\n"
        "    def step(self, turn):\n"
        "        self.count[0] += 1\n"
        "        return Observation(str(self.count[0]))\n"
    )
    with pytest.raises(UserError, match="keep state in the object"):
        check_environment(f"{tmp_path / 'shared.py'}:Environment", ["a", "b"])
