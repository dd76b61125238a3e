"""Published ViSpec drafters (arXiv 2509.15235): EAGLE with an image adaptor."""

from __future__ import annotations

from mmspec.drafters.eagle.published import Layout, Shapes
from mmspec.vision.drafters.msd.config import MSDConfig

_PARTS = {
    "adaptor.queries": ["imadpt.q"],
    "adaptor.key.weight": ["imadpt.k_proj.weight"],
    "adaptor.key.bias": ["imadpt.k_proj.bias"],
    "adaptor.value.weight": ["imadpt.v_proj.weight"],
    "adaptor.value.bias": ["imadpt.v_proj.bias"],
    "adaptor.out.weight": ["imadpt.o_proj.weight"],
    "img_fc.weight": ["img_fc.weight"],
    "img_fc.bias": ["img_fc.bias"],
}


def _shapes(network: MSDConfig) -> Shapes:
    width = network.hidden_size
    biases = ("imadpt.k_proj.bias", "imadpt.v_proj.bias") if network.qkv_bias else ()
    return {
        "imadpt.q": (2, network.heads, width // network.heads),
        **{f"imadpt.{part}_proj.weight": (width, width) for part in "kvo"},
        **dict.fromkeys(biases, (width,)),
        "img_fc.weight": (width, 2 * width),
        "img_fc.bias": (width,),
    }


LAYOUT = Layout("vispec", MSDConfig, parts=_PARTS, shapes=_shapes)
