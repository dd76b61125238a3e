"""``mmspec eval``: benchmark tasks, decoding methods, scoring, results in Spec-Bench's format, and a report."""
