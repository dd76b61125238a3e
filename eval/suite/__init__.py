"""``mmspec eval``: tasks, methods side by side, results that others' tools read, and a report."""
