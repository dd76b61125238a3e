"""HTML around the controls: links, what the model was trained on, what the methods are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.metadata import PackageNotFoundError, metadata

from mmspec import plugins
from mmspec.demos.catalog import Catalog
from mmspec.demos.chat_request import Kind
from mmspec.demos.methods import explained

_CHECKPOINTS: dict[Kind, str] = {
    "image": "llava-hf/llava-1.5-7b-hf",
    "video": "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "text": "Qwen/Qwen2.5-1.5B-Instruct",
}
_LINKS = {"source": "Code", "documentation": "Docs"}  # labels of the package's addresses, on the page
_PAPER = re.compile(r"arXiv (\d{4}\.\d{5})")


def links_html() -> str:
    """The project's name, with the addresses of its code and docs that the package states."""
    try:
        stated = metadata("mmspec").get_all("Project-URL") or []
    except PackageNotFoundError:
        stated = []
    pairs = (entry.partition(", ") for entry in stated)
    named = [(_LINKS.get(name.lower()), url) for name, _, url in pairs]
    links = "".join(f' <a href="{escape(url)}">{name}</a>' for name, url in named if name)
    return f'<p class="mm-name"><b>mmspec</b>{links} <a href="?view=api">Use from Python</a></p>'


def methods_html(methods: Sequence[str]) -> str:
    """What each method does, with a link to its paper."""
    link = r'<a href="https://arxiv.org/abs/\1" target="_blank" rel="noopener">\g<0></a>'
    pairs = ((name, _PAPER.sub(link, escape(text))) for name, text in explained(methods).items())
    lines = "".join(f"<li><b>{escape(name)}</b>: {text}.</li>" for name, text in pairs)
    return f'<h2 class="mm-part">The methods</h2><ul class="mm-explained">{lines}</ul>'


def about_html(model: str, kind: Kind, catalog: Catalog) -> str:
    """What an embedded model was trained on, and how to use another one; empty for other models."""
    limits = plugins.limits(model)
    if limits is None:
        return ""
    others = [name for name in catalog.models_for(kind) if name != model and name in plugins.installed()]
    select = f" Also installed, see Settings: {', '.join(map(escape, others))}." if others else ""
    start = f"For those, start <code>mmspec demo --model {_CHECKPOINTS[kind]}</code>."
    return f'<p class="mm-about">{escape(limits.partition(";")[0])}. {start}{select}</p>'
