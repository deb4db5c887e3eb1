"""Programs and kernels: from StableHLO or HLO in any form to features of kernels.

Reads programs (``ir``), lowers them to the kernels of a target (``lowering``, ``kernels``), counts
FLOPs and bytes (``cost``), and turns kernels into a table of dimensionless features or graphs
(``table``) for a device (``devices``). ``operators`` does the same for library calls. Every other
folder uses this one, which imports only ``common``.
"""
