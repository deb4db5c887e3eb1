"""The models of the zoo, one module a family."""
