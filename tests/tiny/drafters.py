"""Every registered drafter for a tiny model, trained ones with random weights."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from mmspec import plugins
from mmspec.core.drafter import Drafter
from mmspec.drafters.datastore import build_store
from mmspec.drafters.registry import drafter_spec
from mmspec.drafters.union import Union
from tests.tiny.models import (
    dflash_network,
    eagle3_network,
    eagle_network,
    gemma4_assistant,
    kangaroo_network,
    mamba_network,
    medusa_network,
    msd_network,
    mtp_network,
    text_model,
    vision_model,
    vispec_network,
)


def _dspark_network(model: Any, **changes: Any) -> Any:
    vocab = model.config.get_text_config().vocab_size
    heads = {"markov_rank": 6, "markov_inputs": vocab, "markov_outputs": vocab, "markov_type": "rnn"}
    return dflash_network(model, **{**heads, "confidence": "markov", "from_anchor": True, **changes})


def _dflash2_network(model: Any, **changes: Any) -> Any:
    """A selector among more tokens than a node has children."""
    vocab = model.config.get_text_config().vocab_size
    conv = {"conv_kernel_size": 2, "conv_group_size": 4}
    return dflash_network(
        model, **{**conv, "selector_rank": 6, "selector_tokens": vocab, "selector_top_k": 7, **changes}
    )


@cache
def _tiny_store(vocab: int) -> str:
    """A store of random texts with many repetitions."""
    folder = mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    texts = [torch.randint(vocab, (60,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(40)]
    build_store([text * 2 for text in texts], vocab, "tiny", Path(folder) / "store")
    return f"{folder}/store"


NETWORKS: dict[str, Callable[..., Any]] = {
    "dflash": dflash_network,
    "dflash2": _dflash2_network,
    "dspark": _dspark_network,
    "xpress": lambda model, **changes: _dspark_network(
        model, **{"markov_type": "xpress", "confidence": "none", "from_anchor": False, **changes}
    ),
    "eagle": eagle_network,
    "eagle3": eagle3_network,
    "eagle4": partial(eagle3_network, window=6, head_rank=20, candidates=9, fc_norm=True, norm_output=True),
    "gemma4": gemma4_assistant,
    "flash": partial(msd_network, latents=3, span=16, slots=2),
    "mamba": lambda model, **changes: mamba_network(**changes),
    "hydra": partial(medusa_network, grounded=True),
    "hydra-prefix": partial(medusa_network, grounded=True, layers=2, head=40, head_bias=True, prefix=True),
    "kangaroo": kangaroo_network,
    "medusa": partial(medusa_network, head=40),
    "msd": msd_network,
    "mtp": mtp_network,
    "peagle": partial(eagle3_network, mask_token_id=99),
    "vispec": vispec_network,
}
"""A random network of each trained drafter, for a model."""

VARIANTS = {
    "dflash2": "dflash",
    "dspark": "dflash",
    "eagle4": "eagle3",
    "hydra-prefix": "hydra",
    "peagle": "eagle3",
    "small-vision": "small",
    "xpress": "dflash",
}
"""Settings of registered drafters with which prompts are read or trees are grown in another way."""

TREE = {"top_k": 3, "depth": 4, "total_tokens": 12}


def tiny_drafters() -> list[str]:
    """Names of all registered drafters, and the variants."""
    return [*plugins.names("drafters"), *VARIANTS]


def drafter_class(name: str) -> Any:
    """Class of a drafter of ``tiny_drafters``."""
    return drafter_spec(VARIANTS.get(name, name)).load()


def tiny_drafter(name: str, model: Any, draft_tokens: int | None = None, **settings: Any) -> Drafter | None:
    """A drafter for a tiny model.

    Args:
        name: registered or a variant, or several joined by +; ``"plain"`` is None.
        draft_tokens: size of the draft vocabulary of drafters that may have one; None is the whole one.
        **settings: tree shape of trained drafters, ``TREE`` by default, and fields of their network's configuration.
    """
    if name == "plain":
        return None
    if "+" in name:
        return Union([made for part in name.split("+") if (made := tiny_drafter(part, model)) is not None])
    spec = drafter_spec(VARIANTS.get(name, name))
    if name == "small":
        return spec.load()(text_model("llama"), top_k=TREE["top_k"])
    if name == "small-vision":
        return spec.load()(vision_model("llava", seed=1), top_k=TREE["top_k"], share=0.4)
    if name == "early-exit":
        return spec.load()(1, top_k=TREE["top_k"])
    if name == "datastore":
        return spec.load()(_tiny_store(model.config.get_text_config().vocab_size))
    if spec.alone:
        return spec.make()
    tree = TREE | {key: settings.pop(key) for key in TREE if key in settings}
    if name in ("dspark", "xpress") and draft_tokens is not None:
        settings["markov_outputs"] = draft_tokens
    network = NETWORKS[name](model, **settings)
    own = spec.name == "eagle3" or name in ("medusa", "hydra-prefix")  # an output layer of its own
    rows = 40 if own else None if name == "dflash2" else draft_tokens
    ids = {} if rows is None or name in ("gemma4", "mtp") else {"draft_ids": torch.arange(rows)}
    return spec.load()(network, **ids, **tree)
