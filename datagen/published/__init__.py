"""Published tables of operator latencies as a dataset."""
