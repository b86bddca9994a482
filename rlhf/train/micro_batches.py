"""Splits a batch into micro-batches within a token budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from ratchet.rlhf.distributed import accelerator
from ratchet.rlhf.errors import UserError
from ratchet.rlhf.schema import IMAGES, ROUTES, TURN_IMAGES, prompt_images

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

    from ratchet.rlhf.batch import TrajectoryBatch
    from ratchet.rlhf.models.image_processor import ProcessedImage
    from ratchet.rlhf.models.prefix_sharing import SharedPrompts
    from ratchet.rlhf.models.segments import Segments
    from ratchet.rlhf.models.sequence_parallel import OwnTokens, Team
    from ratchet.rlhf.models.vision import Vision

MASKED = 2**26
"""Maximum size of the masks of shared prompts, in elements."""
TOP_K_IDS = "teacher_topk_ids"
TOP_K_COLUMNS = frozenset({TOP_K_IDS, "teacher_topk_log_probs"})
"""Columns with several values for each response token."""
Layout = Literal["padded", "packed", "shared"]
"""Arrangement of a micro-batch's sequences, each a prompt and its response.

padded: one per row, padded on the right. packed: one after the other in one row. shared: one row with each prompt once,
then all responses.
"""


def by_token_budget(lengths: np.ndarray, budget: int, *, packed: bool = False) -> list[np.ndarray]:
    """Splits rows into pieces within a token budget, longest rows first, so that memory peaks early rather than late.

    Args:
        budget: maximum size of a piece in tokens; a longer row is a piece by itself.
        packed: the size of a piece is the sum of its lengths; otherwise rows x longest, padding included.
    """
    pieces: list[np.ndarray] = []
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        rest = lengths[order[start:]]
        fit = np.searchsorted(np.cumsum(rest), budget, side="right") if packed else budget // max(rest[0], 1)
        size = max(1, int(fit))
        pieces.append(order[start : start + size])
        start += size
    return pieces


def deal(lengths: np.ndarray, budget: int, teams: int, *, packed: bool = False) -> list[list[np.ndarray]]:
    """Deals rows to teams of ranks by length, and splits each team's rows into pieces; see `by_token_budget`.

    The teams' numbers of tokens differ by at most the longest row. A piece may be empty.
    """
    order = np.argsort(-lengths, kind="stable")
    shares = [order[team::teams] for team in range(teams)]
    by_team = [[rows[piece] for piece in by_token_budget(lengths[rows], budget, packed=packed)] for rows in shares]
    # every team gets the same number of pieces, because the ranks of a sharded model compute in lockstep
    most = max(len(team_pieces) for team_pieces in by_team)
    return [team_pieces + [order[:0]] * (most - len(team_pieces)) for team_pieces in by_team]


def in_rounds(sizes: np.ndarray, teams: int) -> list[np.ndarray]:
    """Deals pieces of the given sizes to teams of ranks, which compute in lockstep: a round is a piece for each team.

    Pieces of a round have similar sizes, so all rounds together take at most as long as the mean of the teams and the
    largest piece.
    """
    order = np.argsort(-sizes, kind="stable")
    return [order[team::teams] for team in range(teams)]


def prompt_numbers(batch: TrajectoryBatch) -> np.ndarray:
    """Numbers the prompts of a batch from 0, in the order of their first row; equal prompts have the same number.

    Prompts with other images are not equal, nor those whose tokens went to other experts.
    """
    ids, lengths = batch.flat("prompt_ids"), batch.lengths("prompt_ids")
    numbers: dict[bytes, int] = {}
    ends = np.cumsum(lengths)
    prompts = [ids[end - length : end].tobytes() for end, length in zip(ends, lengths, strict=True)]
    if batch.has_values(IMAGES):
        prompts = [
            prompt + "".join(prompt_images(digests, turns)).encode()
            for prompt, digests, turns in zip(prompts, batch.list(IMAGES), _turn_images(batch), strict=True)
        ]
    if ROUTES in batch:
        routes, end_of = batch.flat(ROUTES), np.cumsum(batch.lengths(ROUTES))
        of_prompt = lengths * (batch.lengths(ROUTES) // np.maximum(tokens_read(batch), 1))
        begins = end_of - batch.lengths(ROUTES)
        prompts = [
            prompt + routes[begin : begin + count].tobytes()
            for prompt, begin, count in zip(prompts, begins, of_prompt, strict=True)
        ]
    return np.array([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=np.int64)


def tokens_read(batch: TrajectoryBatch) -> np.ndarray:
    """Returns how many tokens of each trajectory a model reads: all but the response's last; shape (batch,)."""
    return np.asarray(batch.lengths("prompt_ids") + np.maximum(batch.lengths("response_ids") - 1, 0))


def check_routes(batch: TrajectoryBatch, layers: int, experts: int) -> None:
    """Raises UserError if the column of routes does not fit to the trajectories, or to a model.

    Args:
        layers: number of the model's layers with experts.
        experts: number of experts of such a layer.
    """
    sizes, read = batch.lengths(ROUTES), tokens_read(batch)
    slots = int((sizes // np.maximum(read, 1)).max(initial=0))
    problems = {
        "have another length than its tokens": (sizes > 0) & (sizes != slots * read),
        f"are not of {layers} layers with experts": (sizes > 0) & (slots % layers != 0),
    }
    routes, ends = batch.flat(ROUTES), np.cumsum(sizes)
    beyond = np.flatnonzero((routes < -1) | (routes >= experts))
    problems[f"name other experts than the model's {experts}"] = np.isin(
        np.arange(len(batch)), np.searchsorted(ends, beyond, side="right")
    )
    names = batch.list("trajectory_id") if "trajectory_id" in batch else [f"row {row}" for row in range(len(batch))]
    for problem, rows in problems.items():
        if rows.any():
            raise UserError(
                f"{ROUTES} of {names[int(rows.argmax())]} {problem}: they are damaged, or of another model: generate "
                "the iteration again, or set rollout.router_replay: false"
            )


def by_prompt(
    prompt_of: np.ndarray, prompts: np.ndarray, responses: np.ndarray, limit: int, teams: int = 1
) -> tuple[list[np.ndarray], np.ndarray]:
    """Groups rows by prompt.

    The rows of a prompt are split into several groups if they exceed the limit, or a team's share, because other teams
    would then be idle.

    Args:
        limit: maximum size of a group in tokens, which count a prompt once; a larger row is a group by itself.
        teams: number of teams that the groups are dealt to.
    """
    groups, sizes = _within_limit(prompt_of, prompts, responses, limit)
    if teams == 1:
        return groups, sizes
    share = int(sizes.sum()) // teams + int(prompts.max(initial=0))
    return _within_limit(prompt_of, prompts, responses, min(limit, share))


def _within_limit(
    prompt_of: np.ndarray, prompts: np.ndarray, responses: np.ndarray, limit: int
) -> tuple[list[np.ndarray], np.ndarray]:
    order = np.argsort(prompt_of, kind="stable")
    groups: list[list[int]] = []
    sizes: list[int] = []
    last = -1
    for row in order.tolist():
        if prompt_of[row] != last or sizes[-1] + responses[row] > limit:
            groups.append([])
            sizes.append(int(prompts[row]))
        groups[-1].append(row)
        sizes[-1] += int(responses[row])
        last = prompt_of[row]
    return [np.array(group) for group in groups], np.array(sizes, dtype=np.int64)


@dataclass(frozen=True)
class Piece:
    """Rows that a team computes at once."""

    rows: np.ndarray
    """Row numbers in the batch; empty in a piece that only keeps the team in step."""
    size: int
    """Tokens, padding included."""


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of a prompt and its response, without the response's last token, which predicts nothing.

    With causal attention no token sees the padding to its right, so no attention mask is needed. Packed sequences are
    distinguished by their positions, which restart with each sequence.
    """

    rows: Int[Tensor, " micro"]
    """Row numbers in the batch."""
    input_ids: Int[Tensor, "sequences time"]
    position_ids: Int[Tensor, "*axes sequences time"] | None
    """None: counted from the left. A model that sees may have several axes of positions."""
    at: Int[Tensor, " tokens"]
    """For each response token, the index in the flattened `input_ids` of the position that predicts it."""
    targets: Int[Tensor, " tokens"]
    """The response tokens, row after row."""
    padded_at: Int[Tensor, " tokens"]
    """For each response token, its index in the flattened values of shape (micro-batch, response)."""
    horizon: int
    """Length of the longest response, in tokens."""
    copies: Int[Tensor, "sequences time"]
    """Number of sequences that contain each token: 0 for padding, several for a shared prompt."""
    tokens: int
    """Number of tokens of the sequences, without padding; those of a shared prompt count once per sequence."""
    shared: SharedPrompts | Segments | None = None
    """Attention structure of a row of several sequences; None: padded."""
    own: OwnTokens | None = None
    """The response tokens in this process's share, if a team splits the sequences."""
    routes: Int[Tensor, "sequences time slots"] | None = None
    """The experts of each token in all layers, -1 where the model chooses; None: it always chooses."""
    images: Mapping[str, Tensor] = field(default_factory=dict)
    """Arguments of the model's forward for the images among the tokens; empty: there are none."""
    top: Int[Tensor, "tokens k"] | int = 0
    """For each response token, the teacher's most likely tokens; or how many of the model's own to find; 0: none."""

    @classmethod
    def of(
        cls,
        batch: TrajectoryBatch,
        rows: Sequence[int] | np.ndarray,
        layout: Layout = "padded",
        *,
        varlen: bool = False,
        team: Team | None = None,
        vision: Vision | None = None,
    ) -> MicroBatch:
        """Builds a micro-batch on the CPU.

        Args:
            varlen: describe even short shared prompts by `Segments`.
            team: the processes that split each sequence; None: sequences are not split.
            vision: how the model sees the images of the batch; None: it sees none.
        """
        import torch

        from ratchet.rlhf.models.image_processor import joined
        from ratchet.rlhf.models.prefix_sharing import SharedPrompts
        from ratchet.rlhf.models.segments import Segments

        part = batch.take(rows)
        prompts, responses = part.lengths("prompt_ids"), part.lengths("response_ids")
        response_ids = part.flat("response_ids").astype(np.int64)
        within = _within(responses)
        read = np.maximum(responses - 1, 0)
        is_read = within < np.repeat(read, responses)
        positions: np.ndarray | None = None
        shared: SharedPrompts | Segments | None = None
        routes = _routes(part, prompts + read) if ROUTES in part else None
        prompt_ids, readable_ids, images, axes = part.flat("prompt_ids"), response_ids, [], None
        if vision is not None:
            heard = part.has_values(TURN_IMAGES)
            drawn = part.flat("response_mask").astype(bool) if heard else np.ones(len(response_ids), dtype=bool)
            readable_ids = vision.readable(response_ids, drawn)
        if vision is not None and part.has_values(IMAGES):
            images = [vision.stored(digests or ()) for digests in part.list(IMAGES)]
            axes = _positions(vision, prompt_ids, readable_ids[is_read], prompts, read, images)
        if layout == "shared":
            numbers = prompt_numbers(part)
            _, first = np.unique(numbers, return_index=True)
            unique, once = prompts[first], part.take(first).flat("prompt_ids")
            # the masks of `SharedPrompts` grow with the square of a response
            by_piece = varlen or int((read * (prompts + read)).sum()) > MASKED
            shared = (Segments if by_piece else SharedPrompts).of(unique, read, numbers)
            if images:
                turns = _turn_images(part)
                asked = [prompt_images(images[row], turns[row]) for row in range(len(part))]
                heard_images = [images[row][len(asked[row]) :] for row in range(len(part))]
                images = [*(asked[row] for row in first), *heard_images]
            input_ids = np.concatenate([once, readable_ids[is_read]])[None]
            copies = np.concatenate([np.repeat(np.bincount(numbers), unique), np.ones(int(read.sum()), np.int64)])[None]
            positions = np.concatenate([_within(unique), _within(read) + np.repeat(prompts, read)])[None]
            ends, starts = np.cumsum(unique)[numbers], len(once) + np.cumsum(read) - read
            at = np.where(within == 0, np.repeat(ends, responses), np.repeat(starts, responses) + within) - 1
            before = np.cumsum(prompts + read) - prompts - read
            of_prompts = np.repeat(before[first], unique) + _within(unique)
            of_responses = np.repeat(before + prompts, read) + _within(read)
            order = np.concatenate([of_prompts, of_responses])
            routes = None if routes is None else routes[order][None]
            positions = positions if axes is None else axes[:, None, order]
        else:
            total = prompts + read
            width = int(total.max())
            time = np.arange(width)[None, :]
            real, is_prompt = time < total[:, None], time < prompts[:, None]
            input_ids = np.zeros((len(part), width), dtype=np.int64)
            input_ids[is_prompt] = prompt_ids
            input_ids[real & ~is_prompt] = readable_ids[is_read]
            starts = np.cumsum(total) - total if layout == "packed" else np.arange(len(part)) * width
            at = np.repeat(starts + prompts - 1, responses) + within
            copies = real.astype(np.int64)
            if layout == "packed":
                input_ids, copies = input_ids[real][None], copies[real][None]
                positions = np.broadcast_to(time, real.shape)[real][None] if axes is None else axes[:, None]
                shared = Segments.of_sequences(total)
                routes = None if routes is None else routes[None]
            else:
                if routes is not None:
                    padded = np.full((*real.shape, routes.shape[-1]), -1, dtype=routes.dtype)
                    padded[real] = routes
                    routes = padded
                if axes is not None:
                    positions = np.zeros((len(axes), *real.shape), dtype=np.int64)
                    positions[:, real] = axes
        horizon = int(responses.max(initial=0))
        indices = torch.from_numpy(at)
        return cls(
            rows=torch.as_tensor(np.asarray(rows, dtype=np.int64)),
            input_ids=torch.from_numpy(input_ids.astype(np.int64)),
            position_ids=None if positions is None else torch.from_numpy(_without_one_axis(positions)),
            at=indices,
            targets=torch.from_numpy(response_ids),
            padded_at=torch.from_numpy(np.repeat(np.arange(len(part)) * horizon, responses) + within),
            horizon=horizon,
            copies=torch.from_numpy(copies),
            tokens=int(copies.sum()),
            shared=shared,
            own=None if team is None else team.own(indices, input_ids.shape[1]),
            routes=None if routes is None else torch.from_numpy(routes),
            images=joined([image for row in images for image in row]),
            top=torch.from_numpy(part.flat(TOP_K_IDS).astype(np.int64)).view(len(response_ids), -1)
            if TOP_K_IDS in part
            else 0,
        )

    def to(self, device: torch.device) -> MicroBatch:
        """Returns the micro-batch on a device."""
        return replace(
            self,
            rows=accelerator.placed(self.rows, device),
            input_ids=accelerator.placed(self.input_ids, device),
            position_ids=None if self.position_ids is None else accelerator.placed(self.position_ids, device),
            at=accelerator.placed(self.at, device),
            targets=accelerator.placed(self.targets, device),
            padded_at=accelerator.placed(self.padded_at, device),
            copies=accelerator.placed(self.copies, device),
            shared=None if self.shared is None else self.shared.to(device),
            own=None if self.own is None else self.own.to(device),
            routes=None if self.routes is None else accelerator.placed(self.routes, device),
            images={name: accelerator.placed(tensor, device) for name, tensor in self.images.items()},
            top=self.top if isinstance(self.top, int) else accelerator.placed(self.top, device),
        )

    def padded(self, per_token: Float[Tensor, "tokens ..."]) -> Float[Tensor, "micro response ..."]:
        """Pads values of the response tokens, shape (tokens,), with 0 to shape (micro-batch, response).

        With k values for each token, both shapes have a further dimension.
        """
        size = len(self.rows) * self.horizon
        flat = per_token.new_zeros((size, *per_token.shape[1:])).index_copy(0, self.padded_at, per_token)
        return flat.view(len(self.rows), self.horizon, *per_token.shape[1:])


def _positions(
    vision: Vision,
    prompt_ids: np.ndarray,
    readable_ids: np.ndarray,
    prompts: np.ndarray,
    read: np.ndarray,
    images: Sequence[Sequence[ProcessedImage]],
) -> np.ndarray:
    """Returns the positions of the tokens that a model reads, row after row, shape (axes, tokens)."""
    of_prompts = np.split(prompt_ids, np.cumsum(prompts)[:-1])
    of_responses = np.split(readable_ids, np.cumsum(read)[:-1])
    rows, known = list[np.ndarray](), dict[tuple[bytes, tuple[int, ...]], np.ndarray]()
    for prompt, response, of_row in zip(of_prompts, of_responses, images, strict=True):
        ids = np.concatenate([prompt, response])
        key = (ids.tobytes(), tuple(map(id, of_row)))  # short answers to one prompt are often equal
        if key not in known:
            known[key] = vision.positions(ids, of_row)
        rows.append(known[key])
    return np.asarray(np.concatenate(rows, axis=1), dtype=np.int64)


def _turn_images(batch: TrajectoryBatch) -> Sequence[Sequence[int] | None]:
    return batch.list(TURN_IMAGES) if TURN_IMAGES in batch else [None] * len(batch)


def _without_one_axis(positions: np.ndarray) -> np.ndarray:
    """Leaves out the dimension of axes, shape (axes, sequences, time), if there is only one."""
    return np.asarray(positions[0]) if positions.ndim == 3 and len(positions) == 1 else positions


def _routes(part: TrajectoryBatch, read: np.ndarray) -> np.ndarray | None:
    """Returns the routes of the tokens that a model reads, row after row, shape (tokens, slots), with -1 where they are
    unknown; None if all are."""
    sizes = part.lengths(ROUTES)
    slots = int((sizes // np.maximum(read, 1)).max(initial=0))
    if not slots:
        return None
    routes = np.full((int(read.sum()), slots), -1, dtype=np.int16)
    routes[np.repeat(sizes > 0, read)] = part.flat(ROUTES).reshape(-1, slots)
    return routes


def _within(lengths: np.ndarray) -> np.ndarray:
    """Counts from 0 within each of the given lengths; shape (sum of the lengths,)."""
    starts = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(int(lengths.sum())) - np.repeat(starts, lengths))
