"""Fill-in-the-middle prompts of code models (arXiv 2207.14255), in the layout of llama.cpp's ``/infill``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from mmspec.errors import UserError
from mmspec.targets.processor import Processor, is_token_ids

NAMES = {  # before prefix, suffix and middle; padding; before a repository's and a file's name; end of text
    "pre": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",  # noqa: RUF001
    "suf": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",  # noqa: RUF001
    "mid": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",  # noqa: RUF001
    "pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "sep": "<|file_sep|>",
    "end": "<EOT> ▁<EOT> <|end_of_text|> <|endoftext|>",
}


class Infill:
    """Fill-in-the-middle with the tokens that a tokenizer has by name, or by ids of a GGUF file; ``ends`` are the ids
    of tokens that end the middle. Raises ``UserError`` without tokens for prefix, suffix and middle."""

    def __init__(self, io: Processor) -> None:
        self._io, known = io, io.tokenizer.get_vocab()
        found = {part: known[name] for part, names in NAMES.items() for name in names.split() if name in known}
        self._ids: dict[str, int] = found | getattr(io.tokenizer, "init_kwargs", {}).get("fim_token_ids", {})
        if missing := {"pre", "suf", "mid"} - self._ids.keys():
            expected = NAMES[min(missing)].split()[0]
            raise UserError(f"a suffix needs a model that fills in the middle: it has no token such as {expected}")
        self.ends = sorted(self._ids.values())

    def encode(
        self, prefix: Any, suffix: str, middle: str = "", files: Sequence[tuple[str, str]] | None = None
    ) -> list[int]:
        """Encode a text or token ids before the middle, the text after it, the middle's start, and names and texts of
        further files (None: no tokens of a repository). Names of special tokens are text, except in ``middle``."""
        ids, text = self._ids, partial(self._io.text_ids, add_special_tokens=False)
        sep = [ids["sep"]] if "sep" in ids else []
        result = [token for token in self._io.text_ids("")[:1] if token == self._io.tokenizer.bos_token_id]
        if files is not None:
            result += [ids["rep"], *text("myproject\n")] if "rep" in ids else []
            for name, content in files:
                result += [*sep, *text(f"{name}\n" if sep else "\n\n--- snippet ---\n\n"), *text(content)]
            result += [*sep, *text("filename\n")] if sep else []
        start = text(middle, parse_special=True)
        before = [ids["pre"], *(prefix if is_token_ids(prefix) else text(prefix)), *start]
        return [*result, *before, ids["suf"], *text(suffix), ids["mid"]]
