"""MSD: a drafter that reads the target's hidden states, with text and visual tokens apart (arXiv 2505.14260).

Each step it absorbs the accepted tokens with their true hidden states, then grows a dynamic tree (EAGLE-2, arXiv
2406.16858) in which it feeds on its own guesses of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mmspec import checkpoint
from mmspec.budget import Budget
from mmspec.cache import TreeCache
from mmspec.drafters.growth import Reach, grow_tree
from mmspec.errors import UserError
from mmspec.target import Prompt, Step, Target
from mmspec.tree import TokenTree
from mmspec.verify import Verdict
from vision.drafters import published
from vision.drafters.network import MSDConfig, MSDNetwork, Rotary, Rotation


class MSD:
    """Drafter for any target that shows its hidden states; visual positions are told apart by the target.

    Args:
        network: the trained network; it is moved to the target's device and dtype.
        draft_ids: (n,) int64, the tokens that may be drafted; None allows all. A smaller head costs less, and the
            output stays the target's.
        top_k: nodes extended per level, and children per node.
        depth: levels of the tree below its root.
        total_tokens: drafted nodes at most.
        verifier: the target that it was trained for, as checkpoints name it.
    """

    layouts: ClassVar[tuple[str, ...]] = ("msd", "vispec", "eagle3")  # of published checkpoints
    decoupled: ClassVar[bool] = True  # how those are read
    published: dict[str, Any] | None = None  # the sizes of the target of a published checkpoint

    def __init__(
        self,
        network: MSDNetwork,
        draft_ids: Tensor | None = None,
        *,
        top_k: int = 10,
        depth: int = 6,
        total_tokens: int = 59,
        verifier: dict[str, Any] | None = None,
    ) -> None:
        self.network = network.eval().requires_grad_(False)
        self.draft_ids = draft_ids
        self.top_k, self.depth, self.total_tokens = top_k, depth, total_tokens
        self.verifier = verifier
        self._rotary = Rotary(network.config.head_dim, network.config.rope_theta)
        self._target: Target | None = None
        self._scores: Callable[[Tensor], Tensor] | None = None
        self._cache = TreeCache(1)
        self._root = torch.empty(0)  # (batch, hidden) guess of the state at the last emitted token
        self._positions: list[int] = []  # of each row, tokens absorbed (padding left out)
        self._states: list[list[Tensor]] = []  # of each row, hidden states to absorb, (tokens, hidden) each
        self._tokens: list[list[int]] = []  # and the tokens that follow them

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder holds a published drafter of this kind, or one that is refused by name."""
        return published.recognise(folder) in cls.layouts

    @classmethod
    def from_checkpoint(cls, folder: Path) -> MSD:
        """Read what ``save`` wrote, or a published checkpoint; raises ``UserError`` where it is damaged."""
        if checkpoint.drafter_name(folder) is None:
            shape, tensors, settings = published.read_published(folder, cls.decoupled)
            drafter = cls(network_from(shape, tensors, folder))
            drafter.published = settings["verifier"]
            return drafter
        config, tensors = checkpoint.read(folder)
        try:
            shape = MSDConfig(**config["network"])
            settings = {name: config[name] for name in ("top_k", "depth", "total_tokens", "verifier")}
        except (KeyError, TypeError) as error:
            raise UserError(f"{folder}: expected the settings of an msd drafter, received {error}") from error
        draft_ids = tensors.pop("draft_ids", None)
        return cls(network_from(shape, tensors, folder), draft_ids, **settings)

    def save(self, folder: Path, target: Any) -> None:
        """Write a drafter checkpoint for ``target``."""
        tensors = dict(self.network.state_dict())
        if self.draft_ids is not None:
            tensors["draft_ids"] = self.draft_ids
        settings = {name: getattr(self, name) for name in ("top_k", "depth", "total_tokens")}
        checkpoint.write(folder, "msd", {"network": asdict(self.network.config), **settings}, tensors, target)

    def attach(self, target: Target) -> None:
        if self.verifier is not None:
            checkpoint.check_verifier(self.verifier, target)
        if self.published is not None:
            published.check_target(self.published, target)
        probe = target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
        width = self.network.config.hidden_size
        if probe.shape[-1] != width:
            raise UserError(f"msd must have the target's hidden size {probe.shape[-1]}: the drafter has {width}")
        self.network.to(probe)
        if self.published is not None and self.published["vocab_size"] < target.head(probe).shape[-1]:
            self.draft_ids = torch.arange(self.published["vocab_size"])
        if probe.device.type == "cpu":
            self.network.lay_out_for_few_rows()
        self._target = target
        self._scores = target.head if self.draft_ids is None else target.narrow_head(self.draft_ids)
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(probe.device)

    @torch.inference_mode()
    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        target = self._met()
        batch, length = prompt.input_ids.shape
        mask = prompt.attention_mask
        first = torch.tensor([[row[-1]] for row in history], device=step.hidden.device)
        fed = target.embed(prompt.input_ids) if step.embeds is None else step.embeds  # text needs not be shown
        embeds = torch.cat([fed[:, 1:], target.embed(first)], dim=1)
        visual = None if step.visual is None else F.pad(step.visual[:, 1:], (0, 1))
        x = self.network.combine(embeds, step.hidden, visual)
        self._rotary.reserve(length + 64, x)
        if mask is None:
            self._positions = [length] * batch
            rotation = self._rotary(slice(0, length))
            allowed = None
        else:
            self._positions = mask.sum(1).tolist()
            rotation = self._rotary((mask.long().cumsum(1) - 1).clamp(min=0))
            allowed = mask[:, None, None].bool() & torch.ones(length, length, device=x.device).tril().bool()
            # What stands in the padding attends to itself, so that no row of the mask is empty.
            allowed = allowed | torch.eye(length, dtype=torch.bool, device=x.device)
        self._cache = TreeCache(1, reserve=length + 512)
        guesses = self._forward(x, rotation, allowed, causal=mask is None)
        self._cache.commit_prompt(length, mask, batch, x.device)
        self._root = guesses[:, -1]
        self._states, self._tokens = [[] for _ in history], [[] for _ in history]

    @torch.inference_mode()
    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        target = self._met()
        self._absorb()
        first = self._children(self._root)
        rotations = iter(self._level_rotations(token.device))
        parents = self._root[:, None]
        cache, reach = self._cache, Reach()
        allowed = self._allowed(token.new_ones(len(token), self.top_k, self.top_k * self.depth, dtype=torch.bool))

        def extend(beam: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal parents
            hidden = parents.gather(1, origin[:, :, None].expand(-1, -1, parents.shape[2]))
            x = self.network.combine(target.embed(beam), hidden, None)
            fed = reach(origin)
            mine = allowed[:, :, : beam.shape[1], : cache.length + fed.shape[2]]
            mine[:, 0, :, cache.length :] = fed
            parents = self._forward(x, next(rotations), mine)
            cache.offset += beam.shape[1]
            return self._children(parents)

        tree = grow_tree(token, first, extend, budget, self.top_k, depth=self.depth, nodes=self.total_tokens)
        cache.offset = 0
        return tree

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """Note the true states of what was accepted; it is absorbed when the next tree is asked for."""
        for row, (path, tokens) in enumerate(verdict.host):
            if path:
                contiguous = path[-1] == len(path) - 1
                self._states[row].append(step.hidden[row, : len(path)] if contiguous else step.hidden[row, path])
                self._tokens[row] += tokens

    def _absorb(self) -> None:
        """Take in accepted tokens with true states; ``_root`` becomes the guess of the state at the root."""
        grown = [len(row) for row in self._tokens]
        width = max(grown)
        if width == 0:
            return
        device = self._root.device
        states = [torch.cat(row) if row else self._root.new_zeros(1, self._root.shape[1]) for row in self._states]
        hidden = pad_sequence(states, batch_first=True)
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in self._tokens], device=device)
        x = self.network.combine(self._met().embed(tokens), hidden, None)
        self._rotary.reserve(max(self._positions) + width + self.depth + 1, x)
        begin = self._positions
        if len(begin) == 1:
            rotation = self._rotary(slice(begin[0], begin[0] + width))
        else:
            rotation = self._rotary(torch.tensor(begin, device=device)[:, None] + torch.arange(width, device=device))
        chain = torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(len(grown), -1, -1)
        guesses = self._forward(x, rotation, self._allowed(chain))
        rows = [list(range(n)) for n in grown]
        path = torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)
        self._cache.commit(path, rows)
        self._positions = [at + n for at, n in zip(begin, grown, strict=True)]
        last = [guesses[row, n - 1] if n else self._root[row] for row, n in enumerate(grown)]
        self._root = torch.stack(last)
        self._states, self._tokens = [[] for _ in grown], [[] for _ in grown]

    def _level_rotations(self, device: torch.device) -> Sequence[Rotation]:
        """The rotation of each level of the tree: all nodes of a row's level stand at one position."""
        if len(self._positions) == 1:
            at = self._positions[0]
            return [self._rotary(slice(at + level, at + level + 1)) for level in range(self.depth)]
        begin = torch.tensor(self._positions, device=device)[:, None]
        return [self._rotary(begin + level) for level in range(self.depth)]

    def _allowed(self, reach: Tensor) -> Tensor:
        """(batch, 1, nodes, slots) bool: the committed prefix, and ``reach`` behind it."""
        cache = self._cache
        batch, nodes = reach.shape[:2]
        prefix = cache.attended[:, None, :] if cache.padded else reach.new_ones(1, 1, 1)
        return torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]

    def _forward(self, x: Tensor, rotation: Rotation, allowed: Tensor | None, causal: bool = False) -> Tensor:
        layer: Any = self._cache.layers[0]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = layer.update(k, v)
            return F.scaled_dot_product_attention(q, keys, values, allowed, is_causal=causal, enable_gqa=True)

        return self.network(x, rotation, attend)

    def _children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        assert self._scores is not None, "attach comes first"
        log_probs = self._scores(hidden).float().log_softmax(-1)
        best, tokens = log_probs.topk(min(self.top_k, log_probs.shape[-1]), dim=-1)
        return tokens if self.draft_ids is None else self.draft_ids[tokens], best

    def _met(self) -> Target:
        assert self._target is not None, "attach comes first"
        return self._target


def network_from(shape: MSDConfig, tensors: dict[str, Tensor], folder: Path) -> MSDNetwork:
    """A network that holds exactly these tensors.

    Raises:
        UserError: a tensor is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        network = MSDNetwork(shape)
    expected = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    received = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | received.keys()):
        if expected.get(name) != received.get(name):
            raise UserError(
                f"{folder}: expected {name} {expected.get(name, 'not to be there')}, "
                f"received {received.get(name, 'none')}"
            )
    network.load_state_dict(tensors, assign=True)
    return network


class Eagle(MSD):
    """The same without decoupling (EAGLE, arXiv 2401.15077): visual positions are fused as text is."""

    layouts = ("eagle",)
    decoupled = False

    def __init__(self, network: MSDNetwork, draft_ids: Tensor | None = None, **settings: Any) -> None:
        network.config = replace(network.config, decoupled=False)
        super().__init__(network, draft_ids, **settings)
