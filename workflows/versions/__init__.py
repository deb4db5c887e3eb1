"""Compare versions of programs at git revisions, and check them against budgets."""
