"""Bytes of tokens, for each kind of tokenizer."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mmspec.targets.processor import Processor
from tests.mmspec.targets.test_user_text import _TOKENIZERS

TEXT = "the naïve 👩‍🚀 日本  a\nb"


@pytest.fixture(params=_TOKENIZERS)
def tokenizer(request):
    return _TOKENIZERS[request.param]()


def test_the_bytes_of_tokens_spell_their_text(tokenizer):
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    spelt = [Processor(tokenizer).token_bytes(token) for token in ids]
    assert b"".join(spelt).decode().removeprefix(" ") == TEXT
    assert any(not one.decode(errors="ignore") for one in spelt)  # parts of characters


def test_they_are_those_of_llguidance(tokenizer):
    """An independent reference, which reads the vocabulary by itself."""
    hf = pytest.importorskip("llguidance.hf")
    reference, io = hf.from_tokenizer(tokenizer), Processor(tokenizer)
    for token in range(len(tokenizer)):
        if not io.is_special(token) and io.token_bytes(token) != b"\xff":  # 255 marks special tokens there
            assert io.token_bytes(token) == reference.decode_bytes([token]), token


def test_special_tokens_have_the_bytes_of_their_names(tokenizer):
    io = Processor(tokenizer)
    specials = [token for token in range(len(tokenizer)) if io.is_special(token)]
    assert specials
    for token in specials:
        assert io.token_bytes(token).decode() == tokenizer.convert_ids_to_tokens(token)
        assert tokenizer.decode([token], skip_special_tokens=True) == ""


def test_unigram_and_word_pieces_and_ids_beyond_the_vocabulary():
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁Hello", -1.0), ("▁", -2.0)], unk_id=0))
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    io = Processor(PreTrainedTokenizerFast(tokenizer_object=unigram))
    assert [io.token_bytes(token) for token in (1, 2, 3)] == [b" Hello", b" ", b""]
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "ab": 1, "##c": 2}, unk_token="[UNK]"))
    pieces.decoder = decoders.WordPiece()
    io = Processor(PreTrainedTokenizerFast(tokenizer_object=pieces))
    assert io.token_bytes(1) == b"ab"
