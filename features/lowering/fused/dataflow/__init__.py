"""The dataflow graph that fusion works on: values, views, folding, classes of operations."""
