"""Programs and kernels: what goes in is StableHLO or HLO in any form, what comes out is features.

Reads programs (``reader``), lowers them to the kernels of a target (``lowering``), counts FLOPs and
bytes (``cost``), and turns kernels into a table of dimensionless features (``table``) or graphs
(``graph``). Used by every other folder; imports none of them.
"""
