"""Physics of fused attention: prefill, decode, encoder and multi-head latent attention."""

from __future__ import annotations

from .estimate import ROWS, attention, visible_pairs, visited_keys

__all__ = ["ROWS", "attention", "visible_pairs", "visited_keys"]
