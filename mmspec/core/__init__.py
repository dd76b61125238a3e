"""Token trees, verification, budgets, and the interfaces of targets and drafters."""
