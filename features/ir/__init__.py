"""Programs as operations: StableHLO and HLO text, bytecode and exports in; :class:`Program` out.

Also printers, data types, trip counts of loops, and the isolation of input that is not trusted.
"""
