"""The models of the zoo, one module per family."""
