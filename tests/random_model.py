"""A random model in the shape of Qwen3.5-0.8B, with vision tower and prediction layer, for llama.cpp's converter.

``python -m tests.random_model TOKENIZER FOLDER``: TOKENIZER is a model with Qwen's tokens, such as a GGUF file.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, Qwen3_5Config

from mmspec.drafters.mtp import DRAFT_VOCABULARY
from mmspec.loading import load_processor
from tests.mtp import mtp_tensors, write_target

SHAPE = Path(__file__).parents[1] / "eval" / "shapes" / "qwen3.5.json"
TOWER = {"depth": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 3072, "out_hidden_size": 1024}
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
ROPE |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
IMAGES = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", "patch_size": 16}
IMAGES |= {"size": {"shortest_edge": 2**16, "longest_edge": 2**24}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGES |= {"merge_size": 2, "temporal_patch_size": 2}
TEMPLATE = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{% if one.content is string %}{{ one.content }}{% else %}"
    "{% for item in one.content %}{% if item.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ item.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save(tokenizer: str, folder: Path) -> None:
    """Write the folder, with weights of the size of transformers' initial weights."""
    words = load_processor(tokenizer).tokenizer
    words.chat_template = TEMPLATE
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {f"vision_{end}_token_id": f"vision_{end}" for end in ("start", "end")}
    text = {**json.loads(SHAPE.read_text()), "vocab_size": 248320, "mtp_num_hidden_layers": 1, "rope_parameters": ROPE}
    text |= {"full_attention_interval": 4, "eos_token_id": words.convert_tokens_to_ids("<|im_end|>")}
    ids = {key: words.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}
    config = Qwen3_5Config(text_config=text, vision_config=TOWER, tie_word_embeddings=True, **ids)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # answers of frequent tokens, as texts are
        model.get_input_embeddings().weight[DRAFT_VOCABULARY:] *= 0.1
    layer = {name: (x * 0.08 * (x.ndim > 1)).bfloat16() for name, x in mtp_tensors(model).items()}
    write_target(folder, model, layer)
    words.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
