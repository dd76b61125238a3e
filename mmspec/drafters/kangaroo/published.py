"""Published Kangaroo adapters (Equationliu/Kangaroo, arXiv 2404.18911): strict reading, without running their code.

A folder has the configuration of a Llama of one layer, of which the layer's attention, its norm and the final norm are
kept. Rotary positions have the base 10,000 whatever it says. The layer at which the target is left is not in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mmspec.drafters.kangaroo.config import KangarooConfig
from mmspec.drafters.kangaroo.network import KangarooNetwork
from mmspec.drafters.parts import check_tensors, parameters, shapes_of, stack
from mmspec.drafters.published import EAGLE_PARTS, PublishedConfig, read_layout
from mmspec.errors import UserError

_PARTS = {f"layers.0.{name}": EAGLE_PARTS[name] for name in ("qkv.weight", "out.weight", "input_norm.weight")}
_PARTS["norm.weight"] = ["norm.weight"]


def read_published(folder: Path) -> tuple[KangarooConfig, dict[str, Tensor], dict[str, Any]]:
    """Read a published adapter.

    Returns:
        The network's configuration, its tensors in their original dtype, and its target, for
        ``published.check_target``.

    Raises:
        UserError: a damaged or unsupported checkpoint, or a tensor that is missing, unexpected or does not match
            ``config.json``.
    """
    config, tensors = read_layout(folder, "kangaroo", "a Kangaroo adapter")
    source = f"{folder}/config.json"
    common = PublishedConfig.read(config, source, others=True)
    if common.num_hidden_layers != 1:
        raise UserError(f"{source}: num_hidden_layers must be 1: got {common.num_hidden_layers}")
    network = KangarooConfig.read({**common.shape(), "mlp": 0}, source)
    shapes = shapes_of(parameters(KangarooNetwork, network), _PARTS, network)
    check_tensors(tensors, shapes, "a Kangaroo adapter", str(folder))
    verifier = {"name_or_path": "", "hidden_size": network.hidden_size, "vocab_size": common.vocab_size}
    return network, stack(tensors, _PARTS), verifier
