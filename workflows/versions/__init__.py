"""Versions of programs: at git revisions, compared with each other, held to budgets."""
