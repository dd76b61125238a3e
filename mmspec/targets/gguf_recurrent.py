"""Architectures of llama.cpp with recurrent layers, and hybrids of them and attention."""

from __future__ import annotations

from mmspec.targets.gguf_keys import Architecture

ARCHITECTURES: dict[str, Architecture] = {}
