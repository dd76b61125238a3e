"""Model classes for lmms-eval and lm-evaluation-harness."""
