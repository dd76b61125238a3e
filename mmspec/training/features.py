"""Feature extraction: runs a target over conversations and returns the hidden states that its drafters train on.

Conversations are encoded as the token sequences that a target processes while it answers them, with answers marked.
Tokens outside of answers equal those of ``pipe.encode`` on the messages before the answer. Answers with recorded tokens
keep these, even if the tokenizer would encode their text differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.target import Feature, Prompt
from mmspec.errors import UserError
from mmspec.pipeline import Pipeline
from mmspec.targets.transformers_target import TransformersTarget
from mmspec.training import data
from mmspec.training.data import Conversation

_TOKEN_TYPES = "mm_token_type_ids"


@dataclass
class Features:
    """A target's features of a batch of conversations, padded on the right. Not inference tensors; without gradients.

    Attributes:
        tokens: (batch, length) int64, 0 at padding.
        hidden: (batch, length, hidden), last hidden states after the final norm, 0 at padding.
        embeds: (batch, length, hidden), input embeddings; visual features at visual positions.
        layers: (batch, length, n * hidden), the states of further layers that the extractor reads, concatenated, 0 at
            padding; None if it reads none.
        visual: (batch, length) bool, positions of image and video features.
        answer: (batch, length) bool, tokens that the target generates, which a drafter learns to predict.
        keep: (batch, length) bool, False at padding.
    """

    tokens: Tensor
    hidden: Tensor
    embeds: Tensor
    visual: Tensor
    answer: Tensor
    keep: Tensor
    layers: Tensor | None = None


@dataclass
class ConversationFeatures:
    """Features of one conversation, without padding.

    Attributes:
        tokens, visual, answer: (length,) as in ``Features``.
        hidden: (length, hidden).
        shown: (visual positions, hidden), the visual features.
        layers: (length, n * hidden), or None.
    """

    tokens: Tensor
    hidden: Tensor
    shown: Tensor
    visual: Tensor
    answer: Tensor
    layers: Tensor | None = None


CONTEXT = -1
"""Turn of the tokens outside of answers."""

_VIDEO: dict[str, Any] = {"frames": None, "fps": None, "backend": "pyav"}  # sampling, for targets that take videos
_Token = tuple[int, int]  # token id; index of its answer, or CONTEXT


@dataclass
class EncodedConversation:
    """Inputs of a target for one conversation.

    Attributes:
        tokens: (length,) int64, media placeholders expanded.
        turn: (length,) int64, index of the answer that a token belongs to, or ``CONTEXT``.
        visual: (length,) bool, positions of image and video features.
        inputs: other arguments of the model's forward (``pixel_values``, ...), on its device.
    """

    tokens: Tensor
    turn: Tensor
    visual: Tensor
    inputs: dict[str, Any]

    def cut(self, length: int) -> EncodedConversation:
        """The first ``length`` positions, which must include all media."""
        return replace(self, tokens=self.tokens[:length], turn=self.turn[:length], visual=self.visual[:length])


class Encoder:
    """Encodes conversations for one target.

    Args:
        pipe: holds the target; its processor or tokenizer must have a chat template.
        max_length: maximum length in tokens; by default, and at most, the target's context length.

    Attributes:
        settings: settings that the sequences depend on besides target and conversation, as JSON values.
    """

    def __init__(self, pipe: Pipeline, max_length: int | None = None) -> None:
        self.pipe, target, processor = pipe, pipe.target, pipe.processor
        limits = [limit for limit in (max_length, target.context_limit) if limit is not None]
        self.max_length = min(limits, default=None)
        self._reasons: dict[str, str] = {}
        self.settings: dict[str, Any] = {"max_length": self.max_length, **_VIDEO}
        config = target.model.config
        marks = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
        self.visual_ids = {mark for mark in marks if mark is not None}
        self.stops = {*target.eos_token_ids, processor.tokenizer.eos_token_id} - {None}
        renderer = processor.plain if processor.reads_media else processor.tokenizer
        if not getattr(renderer, "chat_template", None):
            raise UserError("conversations need a chat template: the model's processor has none")
        self._render = renderer.apply_chat_template

    @property
    def skipped(self) -> Counter[str]:
        """Number of skipped conversations so far by reason."""
        return Counter(self._reasons.values())

    def __call__(self, conversation: Conversation) -> EncodedConversation | None:
        """Encodes a conversation, without the last turns that exceed the maximum length.

        If not even the first turn fits, its answer is truncated. Returns None if fewer than two of its tokens fit.

        Raises:
            UserError: a file cannot be read, or the processor adds other tokens around media than the chat template.
        """
        encoded = self._encode(conversation)
        if encoded is None or self.max_length is None or len(encoded.tokens) <= self.max_length:
            return encoded
        ends = [int((encoded.turn == turn).nonzero()[-1]) + 1 for turn in range(len(conversation.answers))]
        keep = max(1, sum(end <= self.max_length for end in ends))
        shorter = encoded if keep == len(conversation.answers) else self._encode(_first_turns(conversation, keep))
        assert shorter is not None
        start = int((shorter.turn >= 0).int().argmax())
        if start + 2 > self.max_length:
            self._reasons[conversation.id] = "too long"
            return None
        return shorter.cut(self.max_length)

    def _encode(self, conversation: Conversation) -> EncodedConversation | None:
        processor: Any = self.pipe.processor
        media: dict[str, Any] = {}
        if processor.reads_media:
            shown, media["images"], media["videos"] = processor.place_media(conversation.messages, **_VIDEO)
        else:
            shown = data.as_text(conversation.messages)
        if processor.has_typed_tokens(shown):
            self._reasons[conversation.id] = "special tokens in the text"
            return None
        last = max(index for index, message in enumerate(shown) if message["role"] == "assistant")
        prompt = self.pipe.encode([{"prompt": shown[:last], **media}])
        processed = prompt.input_ids[0].tolist()
        tokens = self._tokens(shown[: last + 1], conversation.answers)
        if any(token in self.visual_ids for token, turn in tokens if turn != CONTEXT):
            self._reasons[conversation.id] = "visual tokens in an answer"
            return None
        self._check_expansion(shown[:last], processed)
        tokens = self._expanded(tokens, processed)
        ids, turns = (torch.tensor(column, dtype=torch.long) for column in zip(*tokens, strict=True))
        visual = torch.isin(ids, torch.tensor(sorted(self.visual_ids), dtype=torch.long))
        return EncodedConversation(ids, turns, visual, prompt.inputs)

    def _text(self, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        return self._render(messages, add_generation_prompt=generation_prompt, tokenize=False)

    def _ids(self, text: str, whole: bool = True) -> list[int]:
        special = whole and self.pipe.processor.adds_special_tokens(text)
        return self.pipe.processor.tokenizer(text, add_special_tokens=special)["input_ids"]

    def _tokens(self, messages: list[dict[str, Any]], answers: Sequence[tuple[int, ...] | None]) -> list[_Token]:
        """The sequence up to the last answer, before placeholders are expanded."""
        text = self._text(messages, generation_prompt=False)
        spans = self._spans(messages, text)
        pieces = self._pieces(text, [0, *(cut for span in spans for cut in span), len(text)])
        tokens = [(token, CONTEXT) for token in pieces[0]]
        for number, recorded in enumerate(answers[: len(spans)]):
            answer, after = list(recorded or pieces[2 * number + 1]), pieces[2 * number + 2]
            written = after[:1] if after and after[0] in self.stops else []
            ended = recorded is None or answer[-1] in self.stops
            if number == len(spans) - 1:
                own = [answer.pop()] if recorded is not None and ended else written
                close = own or [self.pipe.processor.tokenizer.eos_token_id]
                close, after = close if ended else [], []
            else:
                # Between turns, a recorded end-of-sequence token counts only if the template writes one too.
                answer = answer[:-1] if recorded is not None and ended else answer
                close, after = written, after[len(written) :]
            tokens += [(token, number) for token in answer]
            tokens += [(token, number if ended else CONTEXT) for token in close]
            tokens += [(token, CONTEXT) for token in after]
        return tokens

    def _spans(self, messages: list[dict[str, Any]], text: str) -> list[tuple[int, int]]:
        """Start and end of each answer in the rendered text; starts at the end of its generation prompt."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._text(messages[:index], generation_prompt=True)
                answer = data.text_of(message["content"]).strip()
                start = text.find(answer, len(prompt)) if text.startswith(prompt) else -1
                if start < 0:
                    raise UserError("the chat template must render a message the same, whatever follows: it does not")
                spans.append((len(prompt), start + len(answer)))
        return spans

    def _pieces(self, text: str, cuts: list[int]) -> list[list[int]]:
        """Tokens of the text between cuts; tokenized as a whole if no token crosses a cut."""
        whole = self._ids(text)
        heads = [self._ids(text[:cut]) if cut else [] for cut in cuts]
        if all(whole[: len(head)] == head for head in heads):
            return [whole[len(a) : len(b)] for a, b in pairwise(heads)]
        return [self._ids(text[a:b], whole=a == 0) for a, b in pairwise(cuts)]

    def _check_expansion(self, messages: list[dict[str, Any]], processed: list[int]) -> None:
        plain = self._ids(self._text(messages, generation_prompt=True))
        ours, theirs = (self._runs(ids) for ids in (plain, processed))
        our_text, their_text = ([run for run in runs if run[0] not in self.visual_ids] for runs in (ours, theirs))
        if our_text != their_text or len(ours) != len(theirs):
            raise UserError(
                f"cannot train on these conversations with {type(self.pipe.model).__name__}: expected a processor "
                "that only repeats the chat template's image and video tokens, received other tokens around them"
            )

    def _runs(self, ids: list[int]) -> list[list[int]]:
        """Split a sequence into runs of visual tokens and of other tokens."""
        return [list(run) for _, run in groupby(ids, key=lambda token: token in self.visual_ids)]

    def _expanded(self, tokens: list[_Token], processed: list[int]) -> list[_Token]:
        """Replace each run of placeholders by the processor's expansion of it."""
        runs = iter([run for run in self._runs(processed) if run[0] in self.visual_ids])
        result: list[_Token] = []
        for visual, group in groupby(tokens, key=lambda token: token[0] in self.visual_ids):
            result += [(token, CONTEXT) for token in next(runs)] if visual else group
        return result


def _first_turns(conversation: Conversation, count: int) -> Conversation:
    """The conversation up to and including its ``count``-th answer."""
    answers = [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    messages = conversation.messages[: answers[count - 1] + 1]
    return replace(conversation, messages=messages, answers=conversation.answers[:count])


class Extractor:
    """Runs a target over conversations; calling it returns their ``Features``.

    A conversation whose first question exceeds ``max_length`` is skipped. A batch of skipped ones is a row of padding.

    Args:
        max_length: as for ``Encoder``.
        layers: further hidden states to read.
    """

    def __init__(self, pipe: Pipeline, max_length: int | None = None, layers: Sequence[Feature] = ()) -> None:
        self.target: TransformersTarget = pipe.target
        self.layers = tuple(layers)
        self.encoder = Encoder(pipe, max_length)

    @property
    def skipped(self) -> Counter[str]:
        """Number of skipped conversations by reason."""
        return self.encoder.skipped

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the features depend on besides target and conversation, as JSON values."""
        return self.encoder.settings | ({"layers": list(self.layers)} if self.layers else {})

    def __call__(self, conversations: Sequence[Conversation]) -> Features:
        return collate([row for row in self.rows(conversations) if row is not None], self.target)

    def rows(self, conversations: Sequence[Conversation]) -> list[ConversationFeatures | None]:
        """The features of each conversation; None for skipped ones."""
        encoded = [self.encoder(conversation) for conversation in conversations]
        usable = [one for one in encoded if one is not None]
        batches = [usable] if _stackable(usable) else [[one] for one in usable]
        rows = iter([row for batch in batches if batch for row in self._run(batch)])
        return [None if one is None else next(rows) for one in encoded]

    def _run(self, batch: Sequence[EncodedConversation]) -> list[ConversationFeatures]:
        device = self.target.device
        longest = max(len(one.tokens) for one in batch)
        pads = [longest - len(one.tokens) for one in batch]
        ids = torch.stack([torch.nn.functional.pad(one.tokens, (p, 0)) for one, p in zip(batch, pads, strict=True)])
        mask = (torch.arange(longest) >= torch.tensor(pads, dtype=torch.long)[:, None]).long()
        inputs = _concatenated(batch)
        if any(_TOKEN_TYPES in one.inputs for one in batch):
            inputs[_TOKEN_TYPES] = self._token_types(ids).to(device)
        prompt = Prompt(ids.to(device), mask.to(device) if any(pads) else None, inputs)
        self.target.features = ("last", *self.layers)
        self.target.select([])
        output = self.target.prefill(prompt, max_new_tokens=1)
        self.target.select([])
        rows = []
        for index, (one, pad) in enumerate(zip(batch, pads, strict=True)):
            visual = one.visual.to(device)
            # Clones made outside of inference mode can be used in autograd.
            hidden = output.features["last"][index, pad:].clone()
            shown = hidden[:0] if output.embeds is None else output.embeds[index, pad:][visual].clone()
            read = [output.features[name][index, pad:] for name in self.layers]
            layers = torch.cat(read, dim=-1).clone() if read else None
            answer = (one.turn >= 0).to(device)
            rows.append(ConversationFeatures(one.tokens.to(device), hidden, shown, visual, answer, layers))
        return rows

    def _token_types(self, ids: Tensor) -> Tensor:
        """Token type ids as processors return them: 0 for text, 1 for images, 2 for videos."""
        config = self.target.model.config
        types = torch.zeros_like(ids)
        for kind, name in enumerate(("image_token_id", "video_token_id"), start=1):
            types[ids == getattr(config, name, -1)] = kind
        return types


def collate(rows: Sequence[ConversationFeatures], target: TransformersTarget) -> Features:
    """Pads conversations into a batch; no conversations become one row of padding."""
    device, dtype = target.device, target.model.dtype
    if not rows:
        empty = torch.zeros(2, target.config.hidden_size, device=device, dtype=dtype)
        marks = torch.zeros(2, dtype=torch.bool, device=device)
        rows = [ConversationFeatures(marks.long(), empty, empty[:0], marks, marks)]
        lengths = torch.zeros(1, dtype=torch.long)
    else:
        lengths = torch.tensor([len(row.tokens) for row in rows], dtype=torch.long)
    tokens, visual, answer, hidden = (
        pad_sequence([getattr(row, name).to(device) for row in rows], batch_first=True)
        for name in ("tokens", "visual", "answer", "hidden")
    )
    with torch.no_grad():
        # The embedding of a placeholder token is overwritten, and its id may lie outside of the table.
        embeds = target.embed(tokens.masked_fill(visual, 0)).clone()
    embeds[visual] = torch.cat([row.shown for row in rows]).to(device, embeds.dtype)
    keep = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(device)
    found = [row.layers.to(device, dtype) for row in rows if row.layers is not None]
    layers = pad_sequence(found, batch_first=True) if found else None
    return Features(tokens, hidden.to(dtype), embeds, visual, answer, keep, layers)


def _stackable(batch: Sequence[EncodedConversation]) -> bool:
    """Whether the pixel inputs of a batch can be concatenated: videos of unequal numbers of frames cannot."""
    # Images with fewer tiles than others are padded.
    return all(len({value.shape[1 + _tiled(name, value) :] for value in found}) == 1 for name, found in _pixels(batch))


def _pixels(batch: Sequence[EncodedConversation]) -> Iterator[tuple[str, list[Tensor]]]:
    """Pixel inputs of the conversations that have some, by name."""
    for name in dict.fromkeys(name for one in batch for name in one.inputs if name != _TOKEN_TYPES):
        yield name, [one.inputs[name] for one in batch if name in one.inputs]


def _tiled(name: str, value: Tensor) -> bool:
    return name == "pixel_values" and value.ndim == 5


def _concatenated(batch: Sequence[EncodedConversation]) -> dict[str, Any]:
    """Concatenated pixel inputs of a batch."""
    inputs: dict[str, Any] = {}
    for name, values in _pixels(batch):
        if _tiled(name, values[0]):
            most = max(value.shape[1] for value in values)
            values = [torch.nn.functional.pad(value, (0, 0) * 3 + (0, most - value.shape[1])) for value in values]
        inputs[name] = torch.cat(values)
    return inputs
