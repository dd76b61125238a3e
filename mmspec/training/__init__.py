"""Training loops that plug-ins share: one resumable trainer, its plan, optimisers and logs."""
