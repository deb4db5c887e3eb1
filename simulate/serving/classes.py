"""Classes of cost of a serving engine, which effects are learned on."""

from __future__ import annotations

#: Classes of a pass, in the order of cost vectors. Products are split into reading weights
#: (``stream``) and arithmetic (``product``) by their rooflines, experts into ``experts`` and
#: ``grouped`` alike; ``prefill`` and ``decode`` are attention; ``host`` counts passes, ``sequence``
#: the sequences of each, and ``launch`` the layers of passes with prompts, which are not replayed
#: from captured graphs.
CLASSES = (
    "stream",
    "product",
    "experts",
    "grouped",
    "prefill",
    "decode",
    "memory",
    "network",
    "host",
    "sequence",
    "launch",
)
#: Once for each request, before the engine sees it: HTTP, tokenisation, routing.
REQUEST = "request"
