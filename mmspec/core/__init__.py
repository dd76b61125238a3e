"""Token trees, verification, draft plans, and the interfaces of targets and drafters."""
