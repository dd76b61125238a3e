"""Drafters that read the target's hidden states: MSD, with text and visual tokens apart (arXiv 2505.14260), and FLASH,
with a few latents per image and several tokens per pass (arXiv 2505.12728).

Each step they absorb the accepted tokens with their true hidden states, then grow a dynamic tree (EAGLE-2, arXiv
2406.16858) in which they feed on their own guesses of hidden states. One class runs every network; which of FLASH's two
ideas are in use, ``MSDConfig`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from mmspec import checkpoint, kernels, ops
from mmspec.budget import Budget
from mmspec.cache import TreeCache
from mmspec.checkpoint import TREE, TreeShape
from mmspec.drafters.growth import grow_tree
from mmspec.errors import UserError
from mmspec.support import lay_out_for_few_rows
from mmspec.target import Prompt, Step, Target
from mmspec.tree import TokenTree
from mmspec.verify import Verdict
from vision.drafters import published
from vision.drafters.captured import Captured
from vision.drafters.latents import packing, take
from vision.drafters.levels import Levels, TokenLinear
from vision.drafters.network import MSDConfig, MSDNetwork, Rotary, Rotation

_AHEAD = 1024
"""Entries behind a prompt that room is made for at first."""


@dataclass(frozen=True)
class _Settings(TreeShape):
    """What ``config.json`` holds."""

    network: MSDConfig


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
    name: ClassVar[str] = "msd"  # as registered
    learns: ClassVar[bool] = False
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
        TreeShape(top_k, depth, total_tokens)
        self.top_k, self.depth, self.total_tokens = top_k, depth, total_tokens
        self.verifier = verifier
        self._rotary = Rotary(network.config.head_dim, network.config.rope_theta)
        self._target: Target | None = None
        self._scores: Callable[[Tensor], Tensor] | None = None
        self.cache = TreeCache(1)
        # Behind the last emitted token, (batch, hidden) each: the guess, and what the first slot carries.
        self._guess = self._carried = torch.empty(0)
        self._positions: list[int] = []  # of each row, tokens absorbed (padding left out)
        self._states: list[list[Tensor]] = []  # of each row, hidden states to absorb, (tokens, hidden) each
        self._tokens: list[list[int]] = []  # and the tokens that follow them
        self._beyond = 0
        self._captured = Captured(self)  # what takes the place of these where the cache stays in place

    @classmethod
    def recognises(cls, folder: Path) -> bool:
        """Whether a folder holds a published drafter of this kind, or one that is refused by name."""
        return published.recognise(folder) in cls.layouts

    @classmethod
    def from_checkpoint(cls, folder: Path) -> Self:
        """Read what ``save`` wrote, or a published checkpoint; raises ``UserError`` where it is damaged."""
        if checkpoint.drafter_name(folder) is None:
            shape, tensors, found = published.read_published(folder, cls.decoupled)
            drafter = cls(network_from(shape, tensors, folder))
            drafter.published = found["verifier"]
            return drafter
        settings, verifier, tensors = checkpoint.read(folder, _Settings)
        draft_ids = checkpoint.take_draft_ids(tensors, verifier["vocab_size"], folder)
        tree = {name: getattr(settings, name) for name in TREE}
        return cls(network_from(settings.network, tensors, folder), draft_ids, **tree, verifier=verifier)

    def save(self, folder: Path, target: Any) -> None:
        """Write a drafter checkpoint for ``target``."""
        tensors = dict(self.network.state_dict())
        if self.draft_ids is not None:
            tensors["draft_ids"] = self.draft_ids
        settings = {name: getattr(self, name) for name in TREE}
        checkpoint.write(folder, self.name, {"network": asdict(self.network.config), **settings}, tensors, target)

    def attach(self, target: Target) -> None:
        if target is self._target:
            return  # what was captured looks for weights where they are
        if self.verifier is not None:
            checkpoint.check_verifier(self.verifier, target)
        if self.published is not None:
            published.check_target(self.published, target)
        probe = target.embed(torch.zeros(1, dtype=torch.long, device=target.device))
        width = self.network.config.hidden_size
        if probe.shape[-1] != width:
            raise UserError(
                f"{self.name} must have the target's hidden size {probe.shape[-1]}: the drafter has {width}"
            )
        self.network.to(probe)
        if self.published is not None and self.published["vocab_size"] < target.head(probe).shape[-1]:
            self.draft_ids = torch.arange(self.published["vocab_size"])
        lay_out_for_few_rows(self.network)
        self._target = target
        self.cache, self._captured = TreeCache(1), Captured(self)
        self._scores = target.head if self.draft_ids is None else target.narrow_head(self.draft_ids)
        if self.draft_ids is not None:
            self.draft_ids = self.draft_ids.to(probe.device)
        with torch.inference_mode():
            self.fuse = TokenLinear(self.network.fc, target.embed, self.draft_ids)
            if self.network.config.slots > 1:
                self.into = TokenLinear(self.network.cell.into, target.embed, self.draft_ids)

    @torch.inference_mode()
    def begin(self, prompt: Prompt, step: Step, history: list[list[int]]) -> None:
        target, network = self.target, self.network
        batch, length = prompt.input_ids.shape
        mask = None if prompt.attention_mask is None else prompt.attention_mask.bool()
        self._positions = [length] * batch if mask is None else mask.sum(1).tolist()
        first = torch.tensor([[row[-1]] for row in history], device=step.hidden.device)
        fed = target.embed(prompt.input_ids) if step.embeds is None else step.embeds  # text needs not be shown
        embeds, hidden = torch.cat([fed[:, 1:], target.embed(first)], dim=1), step.hidden
        visual = None if step.visual is None else F.pad(step.visual[:, 1:], (0, 1))
        at: slice | Tensor = slice(0, length) if mask is None else (mask.long().cumsum(1) - 1).clamp(min=0)
        if visual is not None and mask is not None:
            visual = visual & mask  # an image that begins a row has no entry for its first token
        images = None if visual is None else network.images(visual)
        if images is not None:
            assert visual is not None
            kept = images.kept(visual)
            order, mask = packing(kept if mask is None else kept & mask, left=True)
            at = order if isinstance(at, slice) else at.gather(1, order)
            embeds, hidden = (take(x, order) for x in network.with_latents(embeds, hidden, images))
            visual = visual.gather(1, order)
            mask = None if bool(mask.all()) else mask
        x = network.combine(embeds, hidden, visual)
        self._rotary.reserve(length + _AHEAD, x)
        entries = x.shape[1]
        allowed = None
        if mask is not None:
            allowed = mask[:, None, None] & torch.ones(entries, entries, device=x.device).tril().bool()
            # What stands in the padding attends to itself, so that no row of the mask is empty.
            allowed = allowed | torch.eye(entries, dtype=torch.bool, device=x.device)
        self._prepare(batch, entries, mask, x)
        outputs = self.forward(x, self._rotary(at), allowed, causal=mask is None)
        self.cache.commit_prompt(entries, mask, batch, x.device)
        self._guess, self._carried = network.begin(outputs[:, -1])
        self._states, self._tokens = [[] for _ in history], [[] for _ in history]
        self._beyond = length - entries  # latents take fewer entries than the positions that they stand for
        if self.cache.in_place:
            self._captured.begin(self._positions, self._guess, self._carried)

    def _prepare(self, batch: int, entries: int, mask: Tensor | None, like: Tensor) -> None:
        """An empty cache for a prompt; one that stays in place serves further prompts, and what was captured of it."""
        left = mask is None or bool((mask.long().diff(dim=1) >= 0).all())
        in_place = left and kernels.fixed_shapes(like.device)
        if in_place and self.cache.serves(batch, entries + _AHEAD // 2, like):
            self.cache.reset()
        else:
            self.cache = TreeCache(1, reserve=entries + _AHEAD, in_place=in_place)

    @torch.inference_mode()
    def propose(self, token: Tensor, budget: Budget) -> TokenTree:
        if self.cache.in_place:
            return self._captured.propose(token, budget)
        self._absorb()
        return self.grow(token, self._guess, self._carried, budget)

    def grow(self, token: Tensor, guess: Tensor, carried: Tensor, budget: Budget) -> TokenTree:
        """The tree behind a guess of the root's state, (batch, hidden), and what its first slot carries."""
        first = self.children(guess)
        levels = Levels(self, guess, carried)
        tree = grow_tree(token, first, levels.extend, budget, self.top_k, depth=self.depth, nodes=self.total_tokens)
        self.cache.offset = 0
        if self.draft_ids is not None:
            tree.tokens[:, 1:] = self.draft_ids[tree.tokens[:, 1:]]
        return tree

    def observe(self, tree: TokenTree, verdict: Verdict, step: Step) -> None:
        """Note the true states of what was accepted; it is absorbed when the next tree is asked for."""
        if self.cache.in_place:
            self._captured.observe(verdict, step)
            return
        for row, (path, tokens) in enumerate(verdict.host):
            if path:
                contiguous = path[-1] == len(path) - 1
                self._states[row].append(step.hidden[row, : len(path)] if contiguous else step.hidden[row, path])
                self._tokens[row] += tokens

    def _absorb(self) -> None:
        """Take in accepted tokens with true states; what is said of the root follows from them."""
        grown, width = [len(row) for row in self._tokens], self.network.config.hidden_size
        longest = max(grown)
        if longest == 0:
            return
        device = self._guess.device
        states = [torch.cat(row) if row else self._guess.new_zeros(1, width) for row in self._states]
        hidden = pad_sequence(states, batch_first=True)
        tokens = torch.tensor([row + [0] * (longest - len(row)) for row in self._tokens], device=device)
        x = self.network.combine(self.target.embed(tokens), hidden, None)
        self._rotary.reserve(max(self._positions) + longest + self.depth + 1, x)
        chain = torch.ones(longest, longest, dtype=torch.bool, device=device).tril().expand(len(grown), -1, -1)
        outputs = self.forward(x, self.rotation(0, longest, 1), self.allowed(chain))
        rows = [list(range(n)) for n in grown]
        path = torch.tensor([row + [-1] * (longest - len(row)) for row in rows], device=device)
        self.cache.commit(path, rows)
        self._positions = [at + n for at, n in zip(self._positions, grown, strict=True)]
        ends = outputs[:, -1] if min(grown) == longest else outputs[range(len(grown)), [n - 1 for n in grown]]
        guess, carried = self.network.begin(ends)
        if not all(grown):
            fed = torch.tensor(grown, device=device)[:, None] > 0
            guess, carried = torch.where(fed, guess, self._guess), torch.where(fed, carried, self._carried)
        self._guess, self._carried = guess, carried
        self._states, self._tokens = [[] for _ in grown], [[] for _ in grown]

    def rotation(self, after: int, count: int, chains: int) -> Rotation:
        """The rotation of ``chains`` chains of ``count`` nodes, which begin ``after`` positions behind the prefix."""
        if self.cache.in_place:
            step = torch.arange(after, after + count, device=self._captured.position.device)
            cos, sin = self._rotary(self._captured.position[:, None] + step)
            return (cos, sin) if count == 1 else (torch.cat([cos] * chains, dim=1), torch.cat([sin] * chains, dim=1))
        begin = [at + after for at in self._positions]
        if len(begin) == 1:
            cos, sin = self._rotary(slice(begin[0], begin[0] + count))
        else:
            device = self._guess.device
            cos, sin = self._rotary(torch.tensor(begin, device=device)[:, None] + torch.arange(count, device=device))
        if count == 1:
            return cos, sin  # one position for all, which broadcasts
        return torch.cat([cos] * chains, dim=-3), torch.cat([sin] * chains, dim=-3)

    def allowed(self, reach: Tensor) -> Tensor:
        """(batch, 1, nodes, slots) bool: the committed prefix, and ``reach`` behind it."""
        cache = self.cache
        batch, nodes = reach.shape[:2]
        prefix = cache.attended[:, None, :] if cache.padded else reach.new_ones(1, 1, 1)
        return torch.cat([prefix.expand(batch, nodes, cache.length), reach], dim=-1)[:, None]

    def forward(self, x: Tensor, rotation: Rotation, allowed: Tensor | None, causal: bool = False) -> Tensor:
        """Guesses behind new entries, (batch, nodes, hidden), which the cache takes in."""
        cache = self.cache
        layer: Any = cache.layers[0]
        behind = cache.in_place and cache.length > 0  # the prompt's own pass is as any other
        if behind:
            cache.enter(x.shape[1])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = layer.update(k, v)
            if behind:
                assert cache.ends is not None
                assert allowed is not None
                ends = cache.ends
                read = ops.tree_attention(q, keys, values, ends.begin, ends.end, allowed[:, 0], start=ends.start)
                return read.transpose(1, 2)
            return F.scaled_dot_product_attention(q, keys, values, allowed, is_causal=causal, enable_gqa=True)

        return self.network(x, rotation, attend)

    def version(self, width: int) -> tuple[object, object]:
        """Make room for a step that absorbs so many tokens and drafts a tree; what stands for the addresses it uses."""
        slots = self.network.config.slots
        self.cache.make_room(width + self.top_k * slots * (self.depth + 1))
        self._rotary.reserve(self.cache.length + self._beyond + width + self.depth + 1, self.network.fc.weight)
        return self.cache.version, self._rotary.version

    def children(self, guess: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens by guesses of states, (..., hidden), as numbers of the draft vocabulary, and their log
        probabilities, (..., top_k) each."""
        assert self._scores is not None, "attach comes first"
        return ops.top_log_probs(self._scores(guess), self.top_k)

    @property
    def target(self) -> Target:
        """What it was attached to."""
        assert self._target is not None, "attach comes first"
        return self._target


def network_from(shape: MSDConfig, tensors: dict[str, Tensor], folder: Path) -> MSDNetwork:
    """A network that holds exactly these tensors.

    Raises:
        UserError: a tensor is missing, unknown or of another shape.
    """
    with torch.device("meta"):
        network = MSDNetwork(shape)
    checkpoint.load_exactly(network, tensors, folder)
    return network


class Eagle(MSD):
    """The same without decoupling (EAGLE, arXiv 2401.15077): visual positions are fused as text is."""

    layouts = ("eagle",)
    decoupled = False

    def __init__(self, network: MSDNetwork, draft_ids: Tensor | None = None, **settings: Any) -> None:
        network.config = replace(network.config, decoupled=False)
        super().__init__(network, draft_ids, **settings)


class Flash(MSD):
    """FLASH (arXiv 2505.12728): the same, for networks with latents or slots."""

    layouts = ()
    name = "flash"
