"""Programs as operations: reads StableHLO and HLO text, bytecode and exports into :class:`Program`.

Also holds printers, data types, trip counts of loops, and the isolation of untrusted input.
"""
