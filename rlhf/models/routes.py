"""Routes: the experts that a mixture of experts chose for each token, recorded, or given to a model to take.

A router scores the experts of a layer, and `torch.topk` chooses some. While routes are given, that one call takes the
given experts instead, and returns the router's own scores of them: the weights of the experts, and so the gradient of
the router, are those of its own scores (R3, arXiv 2510.11370). This is the same for all routers of transformers,
whatever they do with scores before and after.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from ratchet.rlhf.errors import UserError
from ratchet.rlhf.models.prefix_sharing import agree
from ratchet.rlhf.models.truncated import EXPERTS, truncated

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

TOP_K = (torch.topk, torch.Tensor.topk)
OWN = -1
"""Stands for an expert that the router chooses itself."""
TRIED = 7
"""Number of tokens that a model is tried on; no number of experts."""


class FollowsRoutes(Protocol):
    """Routers that take given experts."""

    count: int
    """Number of layers with experts, over all processes that share the model."""
    experts: int
    """Number of experts of such a layer."""

    def follow(self, routes: Int[Tensor, "*tokens slots"] | None) -> None:
        """Makes the routers take these experts from now on, also when activations are recomputed; None: their own.

        Args:
            routes: experts by token, layer and choice; the last dimension has those of all layers. `OWN` in the first
                place of a layer: its router chooses the token's experts itself.
        """

    def end(self) -> None:
        """Lets the routers choose again, after the last backward pass."""


class Routers(FollowsRoutes):
    """The routers of a model of transformers, in the order of its layers."""

    def __init__(self, routers: Sequence[torch.nn.Module], calls: Sequence[int], experts: int) -> None:
        """Adds hooks to the routers of a model. They do nothing until routes are followed or recorded.

        Args:
            calls: number of times that each router calls `topk`; its last call chooses the experts.
            experts: number of experts of a layer.
        """
        self.count, self.experts = len(routers), experts
        self._calls = tuple(calls)
        self._followed: Tensor | None = None
        self._recorded: list[list[Tensor]] | None = None
        self._open: list[_Choice] = []
        for number, router in enumerate(routers):
            router.register_forward_pre_hook(_Enter(self, number))
            # also after an error: recomputing for a gradient ends with one as soon as it has all that it needs
            router.register_forward_hook(_Leave(self), always_call=True)

    @classmethod
    def of(cls, model: PreTrainedModel, small: PreTrainedModel | None = None) -> Routers:
        """Finds the routers of a model by trying a small one of its architecture.

        Args:
            small: what `truncated` builds of the model; None: it is built.

        Raises:
            UserError: the model has no experts, or chooses them in an unknown way.
        """
        attention = model.config._attn_implementation
        plain = attention if attention in ("sdpa", "eager") else "sdpa"
        tried = truncated(model, attention=plain).to(model.device) if small is None else small
        kinds = _kinds(tried)
        found = [(module, kinds[type(module)]) for module in model.modules() if type(module) in kinds]
        return cls([module for module, _ in found], [calls for _, calls in found], number_of_experts(model.config))

    def follow(self, routes: Int[Tensor, "*tokens slots"] | None) -> None:
        """Makes the routers take these experts; see `FollowsRoutes.follow`."""
        if routes is not None and routes.shape[-1] % self.count:
            raise UserError(
                f"routes have {routes.shape[-1]} experts for each token, which the model's {self.count} layers with "
                "experts do not divide: they are of another model"
            )
        self._followed = None if routes is None else routes.reshape(-1, self.count, routes.shape[-1] // self.count)

    def end(self) -> None:
        """Lets the routers choose again."""
        self._followed = None

    @contextmanager
    def recording(self) -> Iterator[list[list[Tensor]]]:
        """Records what the routers choose within the block; yields, for each router, its choices (tokens, k)."""
        self._recorded = [[] for _ in range(self.count)]
        try:
            yield self._recorded
        finally:
            self._recorded = None

    def enter(self, number: int) -> None:
        """Called before a router computes."""
        if self._followed is None and self._recorded is None:
            return
        given = None if self._followed is None else self._followed[:, number]
        choice = _Choice(self._calls[number], given, None if self._recorded is None else self._recorded[number])
        self._open.append(choice)
        choice.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Called after a router has computed."""
        if self._open:
            self._open.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]


class _Enter:
    """A hook, which a copy of the model copies together with its routers."""

    def __init__(self, routers: Routers, number: int) -> None:
        self.routers, self.number = routers, number

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        self.routers.enter(self.number)


class _Leave:
    def __init__(self, routers: Routers) -> None:
        self.routers = routers

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self.routers.leave()


class _Choice(TorchFunctionMode):
    """Answers the call of `topk` that chooses a router's experts."""

    def __init__(self, calls: int, given: Tensor | None, recorded: list[Tensor] | None) -> None:
        super().__init__()
        self.calls, self.given, self.recorded = calls, given, recorded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func not in TOP_K:
            return answer
        self.calls -= 1
        if self.calls:
            return answer
        chosen = answer.indices
        if self.given is not None:
            scores = args[0] if args else kwargs["input"]
            if self.given.shape != chosen.shape:
                raise UserError(
                    f"routes have {self.given.shape[-1]} experts of a layer for each of {len(self.given)} tokens, but "
                    f"the model chooses {chosen.shape[-1]} for each of {len(chosen)}: they are of another model"
                )
            given = self.given.to(chosen.dtype)
            chosen = torch.where(given[:, :1] == OWN, chosen, given)
            answer = torch.return_types.topk((scores.gather(-1, chosen), chosen))
        if self.recorded is not None:
            self.recorded.append(chosen)
        return answer


class _Trial(TorchFunctionMode):
    """Notes which modules choose among so many experts by `topk`, and in which of their calls of it."""

    def __init__(self, model: torch.nn.Module, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.calls: dict[torch.nn.Module, int] = {}
        self.chooses: dict[torch.nn.Module, int] = {}
        self._within: list[torch.nn.Module] = []
        self._hooks: list[Any] = []
        for module in model.modules():
            self._hooks.append(module.register_forward_pre_hook(lambda module, _: self._within.append(module)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._leave()))

    def _leave(self) -> None:
        self._within.pop()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func in TOP_K and self._within:
            module, scores = self._within[-1], args[0] if args else kwargs["input"]
            self.calls[module] = self.calls.get(module, 0) + 1
            if scores.shape == (TRIED, self.experts) and answer.indices.dim() == 2:
                self.chooses[module] = self.calls[module]
        return answer


@torch.no_grad()
def _kinds(small: PreTrainedModel) -> dict[type[torch.nn.Module], int]:
    """Returns the classes of a model's routers, with the number of times that each calls `topk`.

    The model must compute the same with its own routes as without, and something else with others.
    """
    name, experts = type(small).__name__, number_of_experts(small.config)
    unknown = f"{name} chooses its experts in a way that routes cannot be given to: set rollout.router_replay: false"
    ids = torch.arange(TRIED, device=small.device)[None]
    trial = _Trial(small, experts)
    try:
        with trial:
            alone = small.base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        trial.remove()
    last = {module: call for module, call in trial.chooses.items() if call == trial.calls[module]}
    if not last or len(last) < len(trial.chooses):
        raise UserError(unknown)
    found = [module for module in small.modules() if module in last]
    routers = Routers(found, [last[module] for module in found], experts)
    try:
        with routers.recording() as recorded:
            small.base_model(input_ids=ids, use_cache=False)
        own = torch.stack([choice for [choice] in recorded], dim=1)
        others = (own + 1) % experts
        for routes, is_same in ((own, True), (others, False)):
            routers.follow(routes.flatten(1))
            with routers.recording() as recorded:
                hidden = small.base_model(input_ids=ids, use_cache=False).last_hidden_state
            taken = torch.stack([choice for [choice] in recorded], dim=1)
            if not torch.equal(taken, routes) or agree(hidden, alone) is not is_same:
                raise UserError(unknown)
    except (ValueError, RuntimeError):  # another number of choices in each layer
        raise UserError(unknown) from None
    finally:
        routers.end()
    return {type(module): call for module, call in last.items()}


def number_of_experts(config: PreTrainedConfig) -> int:
    """Returns how many experts a layer of a model has. Raises UserError if there are none."""
    text = config.get_text_config()
    counts = [count for name in EXPERTS if isinstance(count := getattr(text, name, None), int) and count > 1]
    if not counts:
        raise UserError(no_experts(config.model_type))
    return counts[0]


def no_experts(model_type: str) -> str:
    """Says that a model has no experts, and what to do."""
    return (
        f"rollout.router_replay is for mixtures of experts, and model.path is a {model_type}, whose config names no "
        f"number of experts ({', '.join(EXPERTS)}): set rollout.router_replay: false"
    )
