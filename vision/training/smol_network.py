"""smol-llava in training: a connector between EfficientNet-lite0 and a language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import FastVlmConfig, FastVlmForConditionalGeneration

from mmspec.errors import UserError
from mmspec.targets.completed import WEIGHTS
from mmspec.training.loss import LossOutput, next_token_loss
from mmspec.vision import efficientnet
from mmspec.vision.efficientnet import BLOCK, LAST, POOLED, EfficientNetLite, EfficientNetLiteConfig
from mmspec.vision.pictures.compose import SIDE
from mmspec.vision.training.picture_batches import VISUAL_TOKENS, PictureBatch

_SHRINKAGE = 0.3
"""Share of a multiple of the identity in the covariance of pooled features."""

_SMALL, _OTHERS = 0.15, 0.3
"""Of the connector's first weights: those of the labels, and the share that is left of the others."""

_OWN = 0.6
"""What remains of a thing's deviation from the mean where the features of a class take its place."""


class SmolLlava(nn.Module):
    """A FastVLM model of which the connector and the gains of the language model's norms are trained, and nothing else.

    Only what is trained is in its `state_dict()`. Tuning the norms adapts a language model to images about as well as
    low-rank updates of its matrices do (Zhao et al., 2312.11420), and leaves the matrices as they were quantised.

    The connector sees features of mean 0 and variance 1 in every channel, but for the labels, which are divided by half
    the length of the language model's embeddings; `folded` puts that into its weights.

    Features of ImageNet's thousand classes, of which there are no pictures, are imagined: where classes share the
    covariance S of features, the classifier's weights w of a class lie along S^-1 (mean of the class - mean of all)
    (linear discriminant analysis), so that any features y of the class deviate from their mean along Cov(y, pooled) w.

    Args:
        language: a causal language model.
        image_token: id of the placeholder of visual tokens.
        weights: of the tower and its classifier; those of the package by default.
        labels: token ids of a phrase for each class, (classes, 4), whose embeddings are the tower's labels.
        pictures: pixels from which the features' means and covariances are taken, (images, 3, 192, 192).
    """

    def __init__(
        self,
        language: Any,
        image_token: int,
        labels: Tensor,
        pictures: Tensor,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        weights = weights or efficientnet.lite0()
        width = language.config.hidden_size
        vision = EfficientNetLiteConfig(image_size=SIDE, classes=len(labels), label_size=width)
        config: Any = FastVlmConfig(
            vision_config=vision,
            text_config=language.config,
            image_token_index=image_token,
            image_seq_length=VISUAL_TOKENS,
        )
        config.tie_word_embeddings = language.config.tie_word_embeddings
        with torch.device("meta"):
            model: Any = FastVlmForConditionalGeneration(config)
        model.model.vision_tower = EfficientNetLite(vision)
        embeddings = language.get_input_embeddings().weight.detach()
        model.model.vision_tower.load_state_dict({**weights, "labels": embeddings[labels].float()})
        model.model.vision_tower.requires_grad_(False).eval()
        model.model.multi_modal_projector = type(model.model.multi_modal_projector)(config)
        model.model.language_model, model.lm_head = language.model, language.lm_head
        language.requires_grad_(False)
        for name, gain in language.named_parameters():
            if name.endswith("norm.weight"):
                gain.data = gain.data.float()  # in bfloat16, small steps would be lost
                gain.requires_grad_()
        self.model, self.config, self.image_token, self.labels = model, config, image_token, labels
        self._measure(pictures)
        self._pass_labels()

    @torch.no_grad()
    def _pass_labels(self) -> None:
        """Lets the connector's visual tokens start as the labels: GELU is near x / 2 for small x."""
        width = self.tower.labels.shape[-1]
        rotation = nn.init.orthogonal_(torch.empty(width, width))
        connector: Any = self.connector
        first, second = connector.linear_1, connector.linear_2
        first.weight *= _OTHERS
        first.weight[:, -width:] = _SMALL * rotation
        second.weight.copy_(2 * self.std[-1] / _SMALL * rotation.T)
        nn.init.zeros_(first.bias)
        nn.init.zeros_(second.bias)

    @torch.no_grad()
    def _measure(self, pictures: Tensor) -> None:
        features = torch.cat([self.features(pixels) for pixels in pictures.split(32)])
        self.mean, self.std = features.mean((0, 1)), features.std((0, 1)).clamp(min=1e-3)
        classifier, said = self.tower.classifier.weight, slice(-self.tower.labels.shape[-1], None)
        self.mean[said], self.std[said] = 0.0, self.tower.labels.square().mean().sqrt() / 2
        means = features[..., : POOLED.stop].mean(1) - self.mean[: POOLED.stop]  # of the last block and pooled
        covariance = means.T @ means[:, POOLED] / len(means)
        own = covariance[POOLED]
        scale = own.diagonal().mean()
        covariance[POOLED] = (1 - _SHRINKAGE) * own + _SHRINKAGE * scale * torch.eye(len(own))
        self.directions = (classifier - classifier.mean(0)) @ covariance.T  # (classes, channels)

    def train(self, mode: bool = True) -> SmolLlava:
        """Sets the mode of what is trained; the tower's batch norms keep their statistics."""
        super().train(mode)
        self.tower.eval()
        return self

    @property
    def tower(self) -> EfficientNetLite:
        return self.model.model.vision_tower

    @property
    def connector(self) -> nn.Module:
        return self.model.model.multi_modal_projector

    @torch.no_grad()
    def features(self, pixels: Tensor) -> Tensor:
        """Returns the tower's output (images, 36, channels) of pixels (images, 3, 192, 192)."""
        return self.tower(pixels).last_hidden_state.flatten(2).transpose(1, 2)

    def see(self, batch: PictureBatch) -> Tensor:
        """Returns normalised features (images, 36, channels), those of imagined classes in their things' places."""
        features = self.features(batch.pixels)
        if bool((at := batch.imagined >= 0).any()):
            features[at] = self.imagine(features[at], batch.imagined[at], batch.strengths[at], batch.masks[at])
        return (features - self.mean) / self.std

    def imagine(self, features: Tensor, numbers: Tensor, strengths: Tensor, masks: Tensor) -> Tensor:
        """Returns features with those of classes put in place of a thing's.

        Args:
            features: (images, 36, channels), not normalised.
            numbers: of the classes, (images,).
            strengths: factors on the deviation of each class from the mean.
            masks: (images, 36), where the thing is.
        """
        moved = features.clone()
        deviation = features[..., : POOLED.stop].mean(1) - self.mean[: POOLED.stop]
        step = strengths[:, None] * self.directions[numbers] - (1 - _OWN) * deviation
        spread = masks / masks.mean(1, keepdim=True).clamp(min=1e-3)
        moved[..., LAST] += spread[..., None] * step[:, None, LAST]
        moved[..., POOLED] = (moved[..., POOLED] + step[:, None, POOLED]).clamp(0, 6)
        said = self.tower.said(moved[:, 0, POOLED])
        moved[..., -said.shape[-1] :] = said.repeat(1, VISUAL_TOKENS // BLOCK, 1)
        return moved

    def forward(self, batch: PictureBatch) -> LossOutput:
        """Returns the next-token loss; its metrics are the loss, "language", and the accuracy "right"."""
        inner = self.model.model
        embeds = inner.language_model.embed_tokens(batch.tokens)  # (batch, length, width)
        if len(batch.pixels):
            visual = self.connector(self.see(batch))
            at_image = (batch.tokens == self.image_token)[..., None]
            embeds = embeds.masked_scatter(at_image, visual.to(embeds.dtype))
        # Fused CPU attention has a slow backward pass for short sequences: matmuls took half the time.
        inner.language_model.set_attn_implementation("sdpa" if batch.tokens.shape[1] > 400 else "eager")
        hidden = inner.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
        loss, accuracy = next_token_loss(hidden, self.model.lm_head, batch.labels)
        return LossOutput(loss, {"language": loss.item(), "right": accuracy})

    def trained(self) -> set[str]:
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the tensors that are trained."""
        state, trained = super().state_dict(*args, **kwargs), self.trained()
        return {name: x for name, x in state.items() if name in trained}

    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({**super().state_dict(), **state}, strict, assign)

    def folded(self) -> dict[str, Tensor]:
        """Returns what is trained under transformers' names; the connector's takes features as they are."""
        state = {name.removeprefix("model."): x for name, x in self.state_dict().items()}
        first = "model.multi_modal_projector.linear_1."
        weight = state[first + "weight"] / self.std
        return state | {first + "weight": weight, first + "bias": state[first + "bias"] - weight @ self.mean}

    def restore(self, folder: Path) -> None:
        """Loads what `export_connector` wrote.

        Raises:
            UserError: the folder holds no such model.
        """
        file = folder / WEIGHTS
        state = (
            {f"model.{name}": x.float() for name, x in load_file(file, backend="pread").items()}
            if file.is_file()
            else {}
        )
        state = {name: x for name, x in state.items() if name in self.trained()}
        if missing := sorted(self.trained() - set(state)):
            raise UserError(f"--start must be a model that this command trained: {file} lacks {missing[0]}")
        first = "model.model.multi_modal_projector.linear_1."
        state[first + "bias"] += state[first + "weight"] @ self.mean
        state[first + "weight"] *= self.std
        self.load_state_dict(state)
